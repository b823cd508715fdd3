// How often two greedy texts choose the same token. Pure arithmetic.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace k3 {

struct Interval {
  double low = 0;
  double high = 1;
};

// Wilson's score interval (E. B. Wilson, 1927) of the share n_hit / n at 95 %: stays inside [0, 1] and says something at 0 and
// at n hits, where the normal approximation has no width. n = 0: [0, 1].
Interval wilson_interval(std::int64_t n_hit, std::int64_t n);

// One position where they differ.
struct Divergence {
  std::int64_t sequence = 0;
  std::int64_t position = 0;  // in the text, from 0
  std::int32_t reference = 0;
  std::int32_t run = 0;
  // By how much the run prefers its own token, in logits; NaN where nobody knows.
  double margin = std::numeric_limits<double>::quiet_NaN();
};

// Counts sequence after sequence. Only steps that both made after the same text say anything about the models: in two texts that
// were written freely, those up to the first difference; under teacher forcing (the run reads the reference's token whatever it
// would have chosen) all.
class GreedyAgreement {
 public:
  static constexpr std::size_t kMostDivergences = 32;  // kept; all are counted

  explicit GreedyAgreement(bool forced) : forced_(forced) {}

  void begin_sequence();
  void add(std::int32_t reference, std::int32_t run,
           double margin = std::numeric_limits<double>::quiet_NaN());

  std::int64_t n_sequence() const { return static_cast<std::int64_t>(first_.size()); }
  std::int64_t n_position() const { return n_position_; }
  std::int64_t n_step() const { return n_step_; }    // made after the same text
  std::int64_t n_equal() const { return n_equal_; }  // of them
  double share() const;                              // n_equal / n_step; 1 when there are none
  Interval interval() const { return wilson_interval(n_equal_, n_step_); }
  // Share of all positions that come before their sequence's first difference.
  double until_divergence() const;
  std::int64_t n_sequence_equal() const;
  // Where each sequence differs first; nothing: nowhere.
  const std::vector<std::optional<std::int64_t>>& first_divergence() const { return first_; }
  const std::vector<Divergence>& divergences() const { return divergences_; }

 private:
  bool forced_;
  std::int64_t at_ = 0;  // in the sequence
  std::int64_t n_position_ = 0;
  std::int64_t n_step_ = 0;
  std::int64_t n_equal_ = 0;
  std::int64_t n_before_ = 0;
  std::vector<std::optional<std::int64_t>> first_;
  std::vector<Divergence> divergences_;
};

}  // namespace k3
