// Which CPU each thread of a rank runs on: one a core, disjoint between the ranks of a node, neighbours in the order of
// NUMA domains. CPUs are the operating system's numbers.
#pragma once

#include <string>
#include <vector>

namespace k3::cpu {

// CPUs of this machine core by core, in the order of its NUMA domains: cores[i] holds the hardware threads of one core.
// From hwloc; throws std::system_error where it cannot tell.
std::vector<std::vector<int>> machine_cores();

// What a rank is allowed and wants.
struct Claim {
  std::vector<int>
      allowed;  // CPUs the launcher bound it to, ascending; all of the machine where it did not
  int threads = 1;
};

struct Places {
  std::vector<int> cpus;  // one a thread; empty: not bound
  bool crowded = false;   // more threads than CPUs: some will wait for a core whatever is done
  std::string why;        // not bound because
};

// The places of claim `mine` among those of a node's ranks. Ranks that are allowed the same CPUs share them out in their
// order. Threads stay unbound where that is better: when CPUs would be left free for other programs and the launcher bound
// nobody (two such jobs would pick the same ones), when sets overlap partly, and when there are more threads than CPUs.
Places place(const std::vector<std::vector<int>>& cores, const std::vector<Claim>& claims,
             std::size_t mine);

// CPUs close to the PCI device ("00000000:17:00.0"): those of its NUMA domain, ascending, from hwloc. Empty where the system
// does not know the device, or has nothing nearer than the whole machine. `xml`: a machine described in a file (lstopo's) instead of
// this one. Throws std::system_error where hwloc cannot tell.
std::vector<int> cpus_near(const std::string& bus_id, const std::string& xml = {});

// Binds the calling thread to one CPU. Throws std::system_error naming it.
void bind_this_thread(int cpu);

}  // namespace k3::cpu
