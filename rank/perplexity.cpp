#include "rank/perplexity.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace k3 {

void PerplexitySum::add(double nll) {
  ++n_token_;
  sum_ += nll;
  sum_squares_ += nll * nll;
}

Perplexity PerplexitySum::result() const {
  Perplexity p;
  p.n_window = n_window_;
  p.n_token = n_token_;
  if (n_token_ == 0) return p;
  const auto n = static_cast<double>(n_token_);
  p.mean_nll = sum_ / n;
  p.value = std::exp(p.mean_nll);
  const double variance = std::max(0.0, sum_squares_ / n - p.mean_nll * p.mean_nll);
  p.error = n_token_ > 1 ? p.value * std::sqrt(variance / (n - 1)) : 0.0;
  return p;
}

double negative_log_likelihood(std::span<const float> logits, std::int32_t id) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float v : logits) sum += std::exp(static_cast<double>(v) - top);
  const double nll = top + std::log(sum) - logits[static_cast<std::size_t>(id)];
  if (!std::isfinite(nll)) throw std::invalid_argument("a row of logits is not finite");
  return nll;
}

Perplexity perplexity(Engine& engine, std::span<const std::int32_t> ids, std::int64_t window,
                      const std::function<void(const Perplexity&)>& after_window) {
  const auto n_ids = static_cast<std::int64_t>(ids.size());
  if (window < 4 || window > engine.config().n_ctx) {
    throw std::invalid_argument("a window of " + std::to_string(window) +
                                " tokens: must lie in 4 to " +
                                std::to_string(engine.config().n_ctx));
  }
  if (n_ids < window) {
    throw std::invalid_argument("the text has " + std::to_string(n_ids) + " tokens, a window " +
                                std::to_string(window));
  }
  const auto n_vocab = static_cast<std::size_t>(engine.model().n_vocab);
  PerplexitySum sum;
  for (std::int64_t begin = 0; begin + window <= n_ids; begin += window) {
    const auto part =
        ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(window));
    std::int64_t at = 0;  // position in the window of the next row
    engine.reset(0);
    engine.logits(0, part, false, [&](std::span<const float> rows, std::int64_t n_row) {
      for (std::int64_t r = 0; r < n_row; ++r, ++at) {
        if (at < window / 2 || at + 1 >= window) continue;
        sum.add(
            negative_log_likelihood(rows.subspan(static_cast<std::size_t>(r) * n_vocab, n_vocab),
                                    part[static_cast<std::size_t>(at + 1)]));
      }
    });
    sum.end_window();
    if (after_window) after_window(sum.result());
  }
  return sum.result();
}

}  // namespace k3
