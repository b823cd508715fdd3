// A batch in numbers: counts and percentiles in memory that does not grow with it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace k3 {

// Counts by size, in steps of 1 %: a percentile is off by 0.5 % at most, whatever the number of values.
class Percentiles {
 public:
  void add(double value);
  // The value that `share` (0 to 1) of all are no larger than; 0 where there are none.
  double at(double share) const;
  std::int64_t count() const { return n_; }
  double mean() const { return n_ == 0 ? 0 : sum_ / static_cast<double>(n_); }

 private:
  static constexpr double kLeast = 1e-7;
  static constexpr std::size_t kBuckets = 3600;  // up to 3.6e8
  std::array<std::uint32_t, kBuckets> n_at_{};
  std::int64_t n_ = 0;
  double sum_ = 0;
};

struct BatchStats {
  std::int64_t n_answered = 0;
  std::int64_t n_failed = 0;  // lines that became an error
  std::int64_t n_before = 0;  // done by earlier runs
  std::int64_t n_prompt_tok = 0, n_reused_tok = 0, n_token = 0, n_step = 0;
  Percentiles queue_s, ttft_s, tpot_s, total_s, prompt_tok, tokens;
};

// How far the input has been read; total 0: not known.
struct BatchPlace {
  std::uint64_t bytes_read = 0, bytes_total = 0;
  std::size_t n_running = 0, n_waiting = 0;
  double seconds = 0;  // since the first step could run
};

// "120 answered, 3 failed, 8 running, 512.3 tok/s, 45 % read, about 130 s left". Pure.
std::string status_line(const BatchStats& stats, const BatchPlace& place);

}  // namespace k3
