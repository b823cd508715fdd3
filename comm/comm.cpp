#include "comm/comm.h"

namespace k3 {

AgreedFault::AgreedFault(int from, int world, const Fault& fault)
    : std::runtime_error("rank " + std::to_string(from) + "/" + std::to_string(world) + ": " +
                         fault.line),
      from_(from),
      fault_(fault) {}

std::string Comm::who() const {
  return "rank " + std::to_string(rank()) + "/" + std::to_string(size());
}

std::uint64_t Comm::count_fused(Point, std::size_t) {
  throw std::logic_error("count_fused: this backend has no peer memory");
}

std::uint64_t Comm::total_calls() const {
  std::uint64_t total = 0;
  for (const PointStats& stats : stats_) total += stats.calls;
  return total;
}

}  // namespace k3
