#include "rank/agreement.h"

#include <algorithm>
#include <cmath>

namespace k3 {

Interval wilson_interval(std::int64_t n_hit, std::int64_t n) {
  if (n == 0) return {};
  constexpr double z = 1.959963984540054;  // of 97.5 %
  const auto count = static_cast<double>(n);
  const double p = static_cast<double>(n_hit) / count;
  const double scale = 1 / (1 + z * z / count);
  const double centre = scale * (p + z * z / (2 * count));
  const double half = scale * z * std::sqrt(p * (1 - p) / count + z * z / (4 * count * count));
  // At the ends the bounds are exact, and rounding would leave them a bit beside.
  return {n_hit == 0 ? 0 : std::max(0.0, centre - half),
          n_hit == n ? 1 : std::min(1.0, centre + half)};
}

void GreedyAgreement::begin_sequence() {
  first_.emplace_back();
  at_ = 0;
}

void GreedyAgreement::add(std::int32_t reference, std::int32_t run, double margin) {
  std::optional<std::int64_t>& first = first_.back();
  ++n_position_;
  const bool same_text = forced_ || !first;
  if (same_text) ++n_step_;
  if (reference == run) {
    if (same_text) ++n_equal_;
    if (!first) ++n_before_;
  } else if (same_text) {
    if (divergences_.size() < kMostDivergences) {
      divergences_.push_back({n_sequence() - 1, at_, reference, run, margin});
    }
    if (!first) first = at_;
  }
  ++at_;
}

double GreedyAgreement::share() const {
  return n_step_ == 0 ? 1 : static_cast<double>(n_equal_) / static_cast<double>(n_step_);
}

double GreedyAgreement::until_divergence() const {
  return n_position_ == 0 ? 1 : static_cast<double>(n_before_) / static_cast<double>(n_position_);
}

std::int64_t GreedyAgreement::n_sequence_equal() const {
  return std::count(first_.begin(), first_.end(), std::nullopt);
}

}  // namespace k3
