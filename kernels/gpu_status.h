// What the driver says of this node's GPUs before anybody uses them: NVIDIA's management library, opened when asked for, so
// that every build has it and none needs it. No context is created on any device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace k3 {

struct GpuProcess {
  std::uint32_t pid = 0;  // as the driver counts them: of the host, perhaps not of this container
  std::uint64_t bytes = 0;
};

struct GpuStatus {
  int index = 0;
  std::string name;
  std::string uuid;    // "GPU-5f2c..."
  std::string bus_id;  // "00000000:17:00.0"
  std::uint64_t memory_bytes = 0;
  std::uint64_t used_bytes = 0;
  std::vector<GpuProcess> processes;   // those that compute
  std::uint32_t sm_mhz = 0;            // now; low while idle
  std::uint32_t most_sm_mhz = 0;       // the device's own limit
  std::uint32_t application_mhz = 0;   // what an administrator set; 0: nothing
  std::vector<std::string> slowed_by;  // why clocks are held down: "hot", "power brake", ...
  std::uint64_t ecc_errors = 0;        // uncorrected, since the driver was loaded
  bool exclusive = false;              // one process a device
  bool split = false;                  // MIG
  std::vector<int> no_peer;            // indices of devices whose memory it cannot read directly
};

struct GpuReport {
  std::string driver;   // "550.54.15"; empty: no driver here, and then no GPUs
  std::string trouble;  // there is a driver, and it does not answer: why
  std::vector<GpuStatus> gpus;
};

// What a device does not tell stays at its default. Throws nothing but std::bad_alloc.
GpuReport gpu_report();

}  // namespace k3
