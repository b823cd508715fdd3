// Tests of ranks that each need a device are shown as skipped where there are not two.
#include "kernels/cuda_devices.h"

namespace k3::test {
const char* reason_to_skip();
const char* reason_to_skip() {
  return k3::cuda_devices().size() < 2 ? "fewer than two CUDA devices" : nullptr;
}
}  // namespace k3::test
