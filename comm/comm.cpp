#include "comm/comm.h"

#include <numeric>

namespace k3 {

AgreedFault::AgreedFault(int from, int world, const Fault& fault)
    : std::runtime_error("rank " + std::to_string(from) + "/" + std::to_string(world) + ": " +
                         fault.line),
      from_(from),
      fault_(fault) {}

std::string Comm::who() const {
  return "rank " + std::to_string(rank()) + "/" + std::to_string(size());
}

void Comm::sum_bands(Point point, float* data, std::size_t n_row,
                     std::span<const std::size_t> widths, StreamHandle stream) {
  if (widths.size() != static_cast<std::size_t>(size())) {
    throw std::logic_error("sum_bands: " + std::to_string(widths.size()) +
                           " widths for a group of " + std::to_string(size()));
  }
  sum(point, data, n_row * std::accumulate(widths.begin(), widths.end(), std::size_t{0}), stream);
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
