#include "apps/batch_stats.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace k3 {
namespace {

const double kLogStep = std::log(1.01);

}  // namespace

void Percentiles::add(double value) {
  const double place = std::log(std::max(value, kLeast) / kLeast) / kLogStep;
  const auto bucket = static_cast<std::size_t>(std::clamp(place, 0.0, double{kBuckets - 1}));
  ++n_at_[bucket];
  ++n_;
  sum_ += value;
}

double Percentiles::at(double share) const {
  if (n_ == 0) return 0;
  const auto rank = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(std::ceil(share * static_cast<double>(n_))));
  std::int64_t seen = 0;
  std::size_t bucket = 0;
  while ((seen += n_at_[bucket]) < rank) ++bucket;
  return kLeast * std::exp((static_cast<double>(bucket) + 0.5) * kLogStep);
}

std::string status_line(const BatchStats& stats, const BatchPlace& place) {
  std::string line =
      fmt::format("{} answered, {} failed, {} running", stats.n_answered + stats.n_before,
                  stats.n_failed, place.n_running);
  if (place.seconds > 0) {
    line += fmt::format(", {:.1f} tok/s", static_cast<double>(stats.n_token) / place.seconds);
  }
  if (place.bytes_total == 0) return line;
  const double share =
      static_cast<double>(place.bytes_read) / static_cast<double>(place.bytes_total);
  line += fmt::format(", {:.0f} % read", 100 * std::min(share, 1.0));
  // Lines that an earlier run answered are read at once and say nothing about the time to come.
  if (stats.n_before == 0 && stats.n_answered > 0 && share < 1) {
    line += fmt::format(", about {:.0f} s left", place.seconds * (1 - share) / share);
  }
  return line;
}

}  // namespace k3
