#include "comm/host_status.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>

namespace k3 {
namespace {

namespace fs = std::filesystem;

std::uint64_t limit_of(decltype(RLIMIT_NOFILE) which) {
  rlimit limit{};
  if (getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return ~std::uint64_t{0};
  return limit.rlim_cur;
}

std::string dotted(in_addr address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  inet_ntop(AF_INET, &address, text.data(), text.size());
  return text.data();
}

bool made_by_containers(const std::string& name) {
  constexpr std::array kPrefixes = {"docker",  "veth", "virbr", "br-", "cni",
                                    "flannel", "cali", "vnet",  "lxc", "podman"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](const char* p) { return name.starts_with(p); });
}

std::vector<NetInterface> interfaces() {
  std::vector<NetInterface> out;
  ifaddrs* raw = nullptr;
  if (getifaddrs(&raw) != 0) return out;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(raw, freeifaddrs);
  for (const ifaddrs* a = raw; a != nullptr; a = a->ifa_next) {
    if (a->ifa_addr == nullptr || a->ifa_addr->sa_family != AF_INET || a->ifa_netmask == nullptr ||
        (a->ifa_flags & IFF_UP) == 0 || (a->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    in_addr address = reinterpret_cast<const sockaddr_in*>(a->ifa_addr)->sin_addr;
    const in_addr mask = reinterpret_cast<const sockaddr_in*>(a->ifa_netmask)->sin_addr;
    NetInterface i;
    i.name = a->ifa_name;
    i.address = dotted(address);
    i.prefix = std::popcount(mask.s_addr);
    i.link_local = (ntohl(address.s_addr) >> 16) == 0xA9FE;
    i.is_virtual = made_by_containers(i.name);
    address.s_addr &= mask.s_addr;
    i.subnet = dotted(address) + "/" + std::to_string(i.prefix);
    out.push_back(std::move(i));
  }
  return out;
}

std::vector<std::string> names_in(const char* folder) {
  std::vector<std::string> out;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none))
    out.push_back(entry.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

constexpr const char* kRdmaFolder = "/sys/class/infiniband";

std::uint64_t number_in(const fs::path& file) {
  std::ifstream in(file);
  std::uint64_t value = 0;
  return in >> value ? value : 0;
}

}  // namespace

HostStatus host_status() {
  HostStatus h;
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    h.shm_bytes = std::uint64_t{shm.f_blocks} * shm.f_frsize;
    h.shm_free_bytes = std::uint64_t{shm.f_bavail} * shm.f_frsize;
  }
  h.memlock_bytes = limit_of(RLIMIT_MEMLOCK);
  h.open_files = limit_of(RLIMIT_NOFILE);
  h.interfaces = interfaces();
  h.rdma = names_in(kRdmaFolder);
  return h;
}

std::vector<NetCounter> net_counters() {
  std::vector<NetCounter> out;
  // Of this process's network namespace; /sys shows that of whoever mounted it.
  std::ifstream in("/proc/self/net/dev");
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 1));
    std::array<std::uint64_t, 9> fields{};  // bytes received are the first, bytes sent the ninth
    for (std::uint64_t& f : fields) words >> f;
    const std::string name = line.substr(line.find_first_not_of(' '), colon);
    out.push_back({name.substr(0, name.find(':')), fields[0] + fields[8]});
  }
  for (const std::string& device : names_in(kRdmaFolder)) {
    NetCounter c{device, 0};
    const fs::path ports = fs::path(kRdmaFolder) / device / "ports";
    for (const std::string& port : names_in(ports.c_str())) {
      constexpr std::uint64_t kUnit = 4;  // these two count words of four bytes
      const fs::path counters = ports / port / "counters";
      c.bytes +=
          kUnit * (number_in(counters / "port_xmit_data") + number_in(counters / "port_rcv_data"));
    }
    out.push_back(c);
  }
  return out;
}

}  // namespace k3
