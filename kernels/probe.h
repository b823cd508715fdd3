// The simplest work a device can be asked for, to find what it reaches at most: what floors are computed from.
#pragma once

#include <cstddef>
#include <memory>

namespace k3 {

// Calls take effect in order on the backend's stream and may return before they are done.
class DeviceProbe {
 public:
  virtual ~DeviceProbe() = default;
  // Reads `bytes` (a multiple of 16) once and keeps next to nothing.
  virtual void read(const std::byte* from, std::size_t bytes) = 0;
  // Products and sums with operands at hand; how many operations they are. 0: nothing was done, there is no code for it.
  virtual double multiply() = 0;
  virtual const char* multiply_what() const = 0;  // "f32, operands in registers"
  // One launch of nothing.
  virtual void nothing() = 0;
};

std::unique_ptr<DeviceProbe> make_cpu_probe(int threads);
// `stream`: Backend::stream() of a CUDA backend, which must outlive the probe. Throws DeviceError without a CUDA part.
std::unique_ptr<DeviceProbe> make_cuda_probe(void* stream);

}  // namespace k3
