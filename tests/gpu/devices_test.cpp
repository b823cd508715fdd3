#include <doctest/doctest.h>

#include "kernels/cuda_devices.h"

TEST_CASE("every device listed has a name, a compute capability and memory") {
  int index = 0;
  for (const k3::CudaDevice& d : k3::cuda_devices()) {
    CHECK(d.index == index++);
    CHECK(!d.name.empty());
    CHECK(d.cc_major >= 1);
    CHECK(d.memory_bytes >= std::uint64_t{1} << 30);
  }
}
