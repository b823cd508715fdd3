#include "kernels/gpu_status.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <memory>

namespace k3 {
namespace {

// The library's binary interface, from NVIDIA's reference of NVML (release 525 and later): names, argument types, the numbers
// below. Its header is not everywhere where its library is.
using Device = void*;
constexpr int kSuccess = 0;
constexpr int kSmClock = 1;
constexpr int kUncorrected = 1;
constexpr int kSinceLoaded = 0;
constexpr int kPeerRead = 0;
constexpr int kExclusiveProcess = 3;

struct PciInfo {
  std::array<char, 16> legacy_bus_id;
  unsigned domain, bus, device, device_id, subsystem_id;
  std::array<char, 32> bus_id;
};
struct MemoryInfo {
  unsigned long long total, free, used;
};
struct ProcessInfo {
  unsigned pid;
  unsigned long long bytes;
  unsigned instance, compute_instance;
};

struct SlowReason {
  unsigned long long bit;
  const char* text;
};
// Idle clocks, clocks that an administrator chose, and power limits in normal work are no faults.
constexpr SlowReason kSlowReasons[] = {
    {0x08, "hardware slowdown"}, {0x20, "heat"}, {0x40, "heat"}, {0x80, "power brake"}};

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};

class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {}
  ~Nvml() {
    if (running_) call("nvmlShutdown");
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  bool present() const { return library_ != nullptr; }
  int start() {
    const int error = call("nvmlInit_v2");
    running_ = error == kSuccess;
    return error;
  }

  // kMissing where this release of the library has no such call.
  static constexpr int kMissing = -1;
  template <class... Args>
  int call(const char* name, Args... args) const {
    auto* const f = reinterpret_cast<int (*)(Args...)>(dlsym(library_.get(), name));
    return f == nullptr ? kMissing : f(args...);
  }
  // A number that stays 0 where the device has none.
  template <class T, class... Args>
  T number(const char* name, Args... args) const {
    T value = 0;
    return call(name, args..., &value) == kSuccess ? value : T{0};
  }
  template <class... Args>
  std::string text(const char* name, Args... args) const {
    std::array<char, 128> buffer{};
    if (call(name, args..., buffer.data(), static_cast<unsigned>(buffer.size() - 1)) != kSuccess)
      return {};
    return buffer.data();
  }
  std::string error_text(int error) const {
    auto* const f =
        reinterpret_cast<const char* (*)(int)>(dlsym(library_.get(), "nvmlErrorString"));
    return f == nullptr ? "error " + std::to_string(error) : f(error);
  }

 private:
  std::unique_ptr<void, CloseLibrary> library_;
  bool running_ = false;
};

std::vector<GpuProcess> processes_of(const Nvml& nvml, Device device) {
  std::array<ProcessInfo, 64> list{};
  std::vector<GpuProcess> out;
  for (const char* name :
       {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"}) {
    auto n = static_cast<unsigned>(list.size());
    if (nvml.call(name, device, &n, list.data()) != kSuccess) continue;
    for (unsigned i = 0; i < std::min<std::size_t>(n, list.size()); ++i) {
      constexpr auto kUnknown = ~0ULL;
      out.push_back({list[i].pid, list[i].bytes == kUnknown ? 0 : list[i].bytes});
    }
    break;
  }
  return out;
}

GpuStatus status_of(const Nvml& nvml, int index, Device device) {
  GpuStatus g;
  g.index = index;
  g.name = nvml.text("nvmlDeviceGetName", device);
  g.uuid = nvml.text("nvmlDeviceGetUUID", device);
  PciInfo pci{};
  if (nvml.call("nvmlDeviceGetPciInfo_v3", device, &pci) == kSuccess) g.bus_id = pci.bus_id.data();
  MemoryInfo memory{};
  if (nvml.call("nvmlDeviceGetMemoryInfo", device, &memory) == kSuccess) {
    g.memory_bytes = memory.total;
    g.used_bytes = memory.used;
  }
  g.processes = processes_of(nvml, device);
  g.sm_mhz = nvml.number<unsigned>("nvmlDeviceGetClockInfo", device, kSmClock);
  g.most_sm_mhz = nvml.number<unsigned>("nvmlDeviceGetMaxClockInfo", device, kSmClock);
  g.application_mhz = nvml.number<unsigned>("nvmlDeviceGetApplicationsClock", device, kSmClock);
  const auto reasons =
      nvml.number<unsigned long long>("nvmlDeviceGetCurrentClocksThrottleReasons", device);
  for (const SlowReason& r : kSlowReasons) {
    if ((reasons & r.bit) == 0) continue;
    if (std::find(g.slowed_by.begin(), g.slowed_by.end(), r.text) == g.slowed_by.end())
      g.slowed_by.emplace_back(r.text);
  }
  g.ecc_errors = nvml.number<unsigned long long>("nvmlDeviceGetTotalEccErrors", device,
                                                 kUncorrected, kSinceLoaded);
  g.exclusive = nvml.number<int>("nvmlDeviceGetComputeMode", device) == kExclusiveProcess;
  unsigned mig = 0;
  unsigned pending = 0;
  g.split = nvml.call("nvmlDeviceGetMigMode", device, &mig, &pending) == kSuccess && mig == 1;
  return g;
}

void find_peers(const Nvml& nvml, const std::vector<Device>& devices,
                std::vector<GpuStatus>& gpus) {
  for (std::size_t a = 0; a < devices.size(); ++a) {
    for (std::size_t b = 0; b < devices.size(); ++b) {
      int status = 0;
      if (a == b || nvml.call("nvmlDeviceGetP2PStatus", devices[a], devices[b], kPeerRead,
                              &status) != kSuccess) {
        continue;
      }
      if (status != 0) gpus[a].no_peer.push_back(gpus[b].index);
    }
  }
}

}  // namespace

GpuReport gpu_report() {
  GpuReport report;
  Nvml nvml;
  if (!nvml.present()) return report;
  const int error = nvml.start();
  if (error != kSuccess) {
    report.trouble = nvml.error_text(error);
    return report;
  }
  report.driver = nvml.text("nvmlSystemGetDriverVersion");
  std::vector<Device> devices;
  const unsigned n = nvml.number<unsigned>("nvmlDeviceGetCount_v2");
  for (unsigned i = 0; i < n; ++i) {
    Device device = nullptr;
    const int failed = nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &device);
    if (failed != kSuccess) {
      report.trouble = "GPU " + std::to_string(i) + ": " + nvml.error_text(failed);
      continue;
    }
    devices.push_back(device);
    report.gpus.push_back(status_of(nvml, static_cast<int>(i), device));
  }
  find_peers(nvml, devices, report.gpus);
  return report;
}

}  // namespace k3
