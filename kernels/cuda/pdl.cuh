// Programmatic dependent launch: a kernel of the decode chain may be set up, and read its weights, while the one before it
// still runs. Whatever an earlier kernel wrote may be touched only after wait_for_predecessor(); memory that this kernel
// writes may still be read by its predecessor before it, so writes come after it too.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/check.h"

namespace k3::cuda {

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The successor's blocks may take the places that this kernel's blocks leave.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the current device knows dependent launches; on others a chained launch is a plain one.
inline bool device_chains() {
  static const bool known = [] {
    int device = 0, major = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "cudaDeviceGetAttribute");
    return major >= 9;
  }();
  return known;
}

// Launches a kernel whose body calls wait_for_predecessor(). cluster > 1: blocks per cluster.
template <class... Params, class... Args>
void launch_chained(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
                    std::size_t shared, int cluster, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = device_chains() ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : device_chains() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...), name);
}

}  // namespace k3::cuda
