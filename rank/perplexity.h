// Perplexity of a text, windowed as llama-perplexity does: consecutive windows of n_window tokens (the rest is dropped), each
// evaluated from an empty state; only predictions made in a window's second half count, where the context is at
// least n_window / 2 tokens long: those at positions n_window / 2 to n_window - 2.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "rank/engine.h"

namespace k3 {

struct Perplexity {
  std::int64_t n_window = 0;  // windows evaluated
  std::int64_t n_token = 0;   // predictions counted
  double mean_nll = 0;        // nats per counted token
  double value = 0;           // exp(mean_nll)
  double error = 0;           // value times the standard error of mean_nll
};

// Collects -log p of counted tokens.
class PerplexitySum {
 public:
  void add(double nll);
  void end_window() { ++n_window_; }
  Perplexity result() const;

 private:
  std::int64_t n_window_ = 0;
  std::int64_t n_token_ = 0;
  double sum_ = 0;
  double sum_squares_ = 0;
};

// -log p(id) under one row of logits, log-sum-exp in double. Throws std::invalid_argument for a row that is not finite.
double negative_log_likelihood(std::span<const float> logits, std::int32_t id);

// Rank 0. `after_window` is called with what has been summed so far. Throws std::invalid_argument when `window` is under 4,
// larger than the engine's context, or when ids do not fill one window.
Perplexity perplexity(Engine& engine, std::span<const std::int32_t> ids, std::int64_t window,
                      const std::function<void(const Perplexity&)>& after_window = {});

}  // namespace k3
