// GPU tests are shown as skipped where there is no device; a driver that fails is a failure.
#include "kernels/cuda_devices.h"

namespace k3::test {
const char* reason_to_skip();
const char* reason_to_skip() { return k3::cuda_devices().empty() ? "no CUDA device" : nullptr; }
}  // namespace k3::test
