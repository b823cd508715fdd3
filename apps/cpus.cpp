#include "apps/cpus.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/places.h"
#include "rank/fault.h"

namespace k3 {
namespace {

// What ranks tell each other.
struct CpuRecord {
  std::array<char, 128> host{};
  cpu_set_t cpus{};
  int threads = 0;
};

// Those of the ranks on this host, in the order of ranks, and where this rank is among them.
struct HostRecords {
  std::vector<CpuRecord> all;
  std::size_t mine = 0;
};

HostRecords exchange(int threads, World& world, Comm& comm) {
  CpuRecord mine;
  world.facts().host.copy(mine.host.data(), mine.host.size() - 1);
  if (sched_getaffinity(0, sizeof mine.cpus, &mine.cpus) != 0) CPU_SET(0, &mine.cpus);
  mine.threads = threads;
  const auto all = comm.all_gather_bytes(Point::kRunConfig, std::as_bytes(std::span(&mine, 1)));
  HostRecords here;
  for (int r = 0; r < comm.size(); ++r) {
    CpuRecord other;
    std::memcpy(&other, all[static_cast<std::size_t>(r)].data(), sizeof other);
    if (other.host != mine.host) continue;
    if (r == comm.rank()) here.mine = here.all.size();
    here.all.push_back(other);
  }
  return here;
}

cpu::Claim claim_of(const CpuRecord& record) {
  cpu::Claim claim;
  for (int c = 0; c < CPU_SETSIZE; ++c) {
    if (CPU_ISSET(c, &record.cpus)) claim.allowed.push_back(c);
  }
  claim.threads = std::max(1, record.threads);
  return claim;
}

}  // namespace

int threads_per_rank(World& world, Comm& comm) {
  const HostRecords here = exchange(0, world, comm);
  cpu_set_t together;
  CPU_ZERO(&together);
  for (const CpuRecord& r : here.all) CPU_OR(&together, &together, &r.cpus);
  return std::max(1, CPU_COUNT(&together) / static_cast<int>(here.all.size()));
}

CpuOptions cpu_options(const RunConfig& config, World& world, Comm& comm) {
  CpuOptions o;
  o.threads = std::max(1, config.threads);
  if (config.cpu_kernels != "best") o.instructions = config.cpu_kernels;
  const HostRecords here = exchange(config.threads, world, comm);
  std::vector<cpu::Claim> claims;
  for (const CpuRecord& r : here.all) claims.push_back(claim_of(r));
  together(comm, [&] {
    const cpu::Places places = cpu::place(cpu::machine_cores(), claims, here.mine);
    o.crowded = places.crowded;
    if (config.bind) o.cpus = places.cpus;
  });
  return o;
}

}  // namespace k3
