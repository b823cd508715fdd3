#include <cuda_runtime.h>

#include <string>

#include "kernels/backend.h"
#include "kernels/cuda_devices.h"

namespace k3 {

namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw DeviceError(std::string(call) + ": " + cudaGetErrorName(status) + ": " +
                    cudaGetErrorString(status));
}

}  // namespace

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  // A machine without a driver reports the driver as too old.
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) return {};
  check(status, "cudaGetDeviceCount");
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp prop{};
    check(cudaGetDeviceProperties(&prop, i), "cudaGetDeviceProperties");
    devices.push_back({i, prop.name, prop.major, prop.minor, prop.totalGlobalMem});
  }
  return devices;
}

}  // namespace k3
