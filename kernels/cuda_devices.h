// Which CUDA devices this process could use. Both builds have it: without the CUDA part the list is empty.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace k3 {

struct CudaDevice {
  int index = 0;  // as cudaSetDevice takes it
  std::string name;
  int cc_major = 0;  // compute capability
  int cc_minor = 0;
  std::uint64_t memory_bytes = 0;  // of the device, used or not
};

// Empty where the build has no CUDA part, and where there is no driver or no device: a normal absence. Any other failure
// throws DeviceError. Does not create a context on any device.
std::vector<CudaDevice> cuda_devices();

}  // namespace k3
