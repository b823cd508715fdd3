// What the CUDA part offers to everyone, for builds without it.
#include "kernels/backend.h"
#include "kernels/cuda_devices.h"
#include "kernels/probe.h"

namespace k3 {

std::vector<CudaDevice> cuda_devices() { return {}; }

std::unique_ptr<Backend> make_cuda_backend(int, Precision, bool) {
  throw DeviceError("this build has no CUDA part (nvcc or nccl.h was not found at configure)");
}

std::unique_ptr<DeviceProbe> make_cuda_probe(void*) {
  throw DeviceError("this build has no CUDA part (nvcc or nccl.h was not found at configure)");
}

}  // namespace k3
