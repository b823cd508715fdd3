#include "kernels/cpu/places.h"

#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <type_traits>

namespace k3::cpu {
namespace {

struct TopologyFree {
  void operator()(hwloc_topology_t t) const { hwloc_topology_destroy(t); }
};

using Topology = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, TopologyFree>;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno ? errno : ENOSYS, std::generic_category(),
                          std::string("hwloc: ") + what);
}

Topology load_topology(const std::string& xml, bool with_devices) {
  const auto check = [](bool good) {
    if (!good) fail("cannot describe this machine");
  };
  hwloc_topology_t raw = nullptr;
  check(hwloc_topology_init(&raw) == 0);
  Topology topology(raw);
  // The OpenGL plugin would ask X displays for GPUs, which can take seconds.
  hwloc_topology_set_components(raw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "gl");
  if (with_devices) hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (!xml.empty()) check(hwloc_topology_set_xml(raw, xml.c_str()) == 0);
  check(hwloc_topology_load(raw) == 0);
  return topology;
}

bool overlap(const std::vector<int>& a, const std::vector<int>& b) {
  return std::any_of(a.begin(), a.end(),
                     [&](int cpu) { return std::find(b.begin(), b.end(), cpu) != b.end(); });
}

// The allowed CPUs, first one of each core in turn, then their second hardware threads.
std::vector<int> in_order(const std::vector<std::vector<int>>& cores,
                          const std::vector<int>& allowed) {
  std::vector<int> out;
  for (std::size_t round = 0; out.size() < allowed.size(); ++round) {
    const std::size_t before = out.size();
    bool deeper = false;
    for (const std::vector<int>& core : cores) {
      deeper |= round < core.size();
      std::size_t nth = 0;
      for (const int cpu : core) {
        if (std::find(allowed.begin(), allowed.end(), cpu) == allowed.end()) continue;
        if (nth++ == round) out.push_back(cpu);
      }
    }
    if (!deeper && out.size() == before) break;  // allowed CPUs that the machine does not list
  }
  return out;
}

}  // namespace

std::vector<std::vector<int>> machine_cores() {
  const Topology topology = load_topology({}, false);
  hwloc_topology_t raw = topology.get();
  std::vector<std::vector<int>> cores;
  const auto type =
      hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_CORE) > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_by_type(raw, type, core)) != nullptr;) {
    std::vector<int> cpus;
    for (int cpu = hwloc_bitmap_first(core->cpuset); cpu >= 0;
         cpu = hwloc_bitmap_next(core->cpuset, cpu)) {
      cpus.push_back(cpu);
    }
    if (!cpus.empty()) cores.push_back(std::move(cpus));
  }
  if (cores.empty()) fail("this machine has no cores");
  return cores;
}

Places place(const std::vector<std::vector<int>>& cores, const std::vector<Claim>& claims,
             std::size_t mine) {
  const Claim& me = claims.at(mine);
  std::size_t all = 0;
  for (const std::vector<int>& core : cores) all += core.size();
  std::size_t before = 0, wanted = 0;  // threads of the ranks that share my CPUs
  Places p;
  for (std::size_t r = 0; r < claims.size(); ++r) {
    if (claims[r].allowed != me.allowed) {
      if (overlap(claims[r].allowed, me.allowed)) p.why = "ranks are bound to overlapping sets";
      continue;
    }
    if (r < mine) before += static_cast<std::size_t>(claims[r].threads);
    wanted += static_cast<std::size_t>(claims[r].threads);
  }
  const std::vector<int> cpus = in_order(cores, me.allowed);
  p.crowded = wanted > cpus.size();
  if (p.crowded) p.why = "more threads than CPUs";
  std::size_t n_core = 0;
  for (const std::vector<int>& core : cores) n_core += overlap(core, me.allowed) ? 1 : 0;
  if (me.allowed.size() == all && wanted < n_core) p.why = "other programs may use the rest";
  if (!p.why.empty()) return p;
  // With a thread for half of the cores at most, neighbours would sit on one core's hardware threads: cores come first.
  p.cpus.assign(cpus.begin() + static_cast<std::ptrdiff_t>(before),
                cpus.begin() + static_cast<std::ptrdiff_t>(before) + me.threads);
  return p;
}

std::vector<int> cpus_near(const std::string& bus_id, const std::string& xml) {
  const Topology topology = load_topology(xml, true);
  const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology.get(), bus_id.c_str());
  if (device == nullptr) return {};
  const hwloc_obj_t place = hwloc_get_non_io_ancestor_obj(topology.get(), device);
  if (place == nullptr || place->cpuset == nullptr) return {};
  if (hwloc_bitmap_isequal(place->cpuset, hwloc_get_root_obj(topology.get())->cpuset)) return {};
  std::vector<int> cpus;
  for (int c = hwloc_bitmap_first(place->cpuset); c >= 0; c = hwloc_bitmap_next(place->cpuset, c))
    cpus.push_back(c);
  return cpus;
}

void bind_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot bind a thread to CPU " + std::to_string(cpu));
  }
}

}  // namespace k3::cpu
