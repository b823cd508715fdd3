// Every CUDA call is checked; a failure is a DeviceError that names the call.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/backend.h"

namespace k3::cuda {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw DeviceError(std::string(call) + ": " + cudaGetErrorName(status) + ": " +
                    cudaGetErrorString(status));
}

// After a launch: its configuration was refused, or an earlier kernel has failed.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace k3::cuda
