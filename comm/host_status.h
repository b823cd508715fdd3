// What this host has for moving bytes: shared memory, limits, networks. Nothing is changed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace k3 {

struct NetInterface {
  std::string name;
  std::string address;      // IPv4, "10.0.0.1"
  int prefix = 0;           // 24 of 10.0.0.1/24
  std::string subnet;       // "10.0.0.0/24"
  bool is_virtual = false;  // of containers and virtual machines: docker0, veth..., virbr0
  bool link_local = false;  // 169.254/16
};

struct HostStatus {
  std::uint64_t shm_bytes = 0;  // of /dev/shm
  std::uint64_t shm_free_bytes = 0;
  std::uint64_t memlock_bytes = 0;       // what a process may pin; ~0: no limit
  std::uint64_t open_files = 0;          // how many files a process may have open
  std::vector<NetInterface> interfaces;  // up, with an IPv4 address, without loopback
  std::vector<std::string> rdma;         // InfiniBand or RoCE devices: "mlx5_0"
};

HostStatus host_status();

// Bytes that each network of this process has sent and received so far: interfaces ("eth0"), and RDMA devices ("mlx5_0"),
// which the system's interfaces do not count.
struct NetCounter {
  std::string name;
  std::uint64_t bytes = 0;
};
std::vector<NetCounter> net_counters();

}  // namespace k3
