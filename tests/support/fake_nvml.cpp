// Stands in for NVIDIA's management library, under its name and with its binary interface: two GPUs. The first is in order; of the second
// everything is wrong that the library can tell.
#include <cstdio>
#include <cstring>

namespace {

struct PciInfo {
  char legacy_bus_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
struct MemoryInfo {
  unsigned long long total, free, used;
};
struct ProcessInfo {
  unsigned pid;
  unsigned long long bytes;
  unsigned instance, compute_instance;
};
static_assert(sizeof(PciInfo) == 68 && sizeof(ProcessInfo) == 24);

int g_devices[2] = {0, 1};
bool second(const void* device) { return device == &g_devices[1]; }
constexpr unsigned long long kGiB = 1ULL << 30;

int text(char* to, unsigned size, const char* from) {
  std::snprintf(to, size, "%s", from);
  return 0;
}

}  // namespace

extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "made to fail"; }
int nvmlSystemGetDriverVersion(char* to, unsigned size) { return text(to, size, "550.54.15"); }
int nvmlDeviceGetCount_v2(unsigned* n) { return *n = 2, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) { return *device = &g_devices[i], 0; }
int nvmlDeviceGetName(void*, char* to, unsigned size) { return text(to, size, "NVIDIA H200"); }
int nvmlDeviceGetUUID(void* d, char* to, unsigned size) {
  return text(to, size, second(d) ? "GPU-b2" : "GPU-a1");
}
int nvmlDeviceGetPciInfo_v3(void* d, PciInfo* pci) {
  std::strcpy(pci->bus_id, second(d) ? "00000000:AA:00.0" : "00000000:17:00.0");
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* d, MemoryInfo* m) {
  m->total = 140 * kGiB;
  m->used = second(d) ? 41 * kGiB : kGiB / 2;
  m->free = m->total - m->used;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* d, unsigned* n, ProcessInfo* list) {
  *n = second(d) ? 1 : 0;
  if (second(d)) list[0] = {4711, 40 * kGiB, 0, 0};
  return 0;
}
int nvmlDeviceGetClockInfo(void* d, int, unsigned* mhz) { return *mhz = second(d) ? 345 : 1980, 0; }
int nvmlDeviceGetMaxClockInfo(void*, int, unsigned* mhz) { return *mhz = 1980, 0; }
int nvmlDeviceGetApplicationsClock(void* d, int, unsigned* mhz) {
  return *mhz = second(d) ? 1200 : 1980, 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* d, unsigned long long* bits) {
  return *bits = second(d) ? 0x60 : 0x1, 0;
}
int nvmlDeviceGetTotalEccErrors(void* d, int type, int counter, unsigned long long* n) {
  return *n = second(d) && type == 1 && counter == 0 ? 3 : 0, 0;
}
int nvmlDeviceGetMigMode(void* d, unsigned* mode, unsigned* pending) {
  return *mode = *pending = second(d) ? 1 : 0, 0;
}
int nvmlDeviceGetP2PStatus(void* a, void*, int, int* status) {
  return *status = second(a) ? 1 : 0, 0;
}
}
