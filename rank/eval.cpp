#include "rank/eval.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>

namespace k3 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Ids of the k largest, largest first; ties: lower id.
std::vector<std::size_t> top_ids(std::span<const float> x, std::size_t k) {
  std::vector<std::size_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), std::size_t{0});
  k = std::min(k, x.size());
  std::partial_sort(
      ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(k), ids.end(),
      [&](std::size_t a, std::size_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  ids.resize(k);
  return ids;
}

[[noreturn]] void rethrow_at(std::int64_t row, const std::exception_ptr& trouble) {
  try {
    std::rethrow_exception(trouble);
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(fmt::format("row {}: {}", row, e.what()));
  }
}

}  // namespace

void log_softmax(std::span<const float> x, std::span<double> y) {
  double top = -kInfinity;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) || x[i] == std::numeric_limits<float>::infinity()) {
      throw std::invalid_argument(fmt::format("token {}: logit is {}", i, x[i]));
    }
    top = std::max(top, static_cast<double>(x[i]));
  }
  if (top == -kInfinity) throw std::invalid_argument("every logit is -inf");
  double sum = 0;
  for (float v : x) sum += std::exp(static_cast<double>(v) - top);
  const double lse = top + std::log(sum);
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = static_cast<double>(x[i]) - lse;
}

double kl_divergence(std::span<const double> log_p, std::span<const double> log_q) {
  double sum = 0;
  for (std::size_t i = 0; i < log_p.size(); ++i) {
    const double p = std::exp(log_p[i]);
    if (p > 0) sum += p * (log_p[i] - log_q[i]);  // p = 0 adds nothing, and 0 * inf would be NaN
  }
  // Equal distributions leave rounding of either sign; a divergence has none.
  return std::max(sum, 0.0);
}

RowComparison compare_row(std::span<const float> run, std::span<const float> reference) {
  std::vector<double> log_q(run.size()), log_p(reference.size());
  const auto normalise = [](const char* which, std::span<const float> x, std::span<double> y) {
    try {
      log_softmax(x, y);
    } catch (const std::invalid_argument& e) {
      throw std::invalid_argument(fmt::format("{}: {}", which, e.what()));
    }
  };
  normalise("run", run, log_q);
  normalise("reference", reference, log_p);
  RowComparison out;
  out.kld = kl_divergence(log_p, log_q);

  double scale = 0;
  for (std::size_t i = 0; i < run.size(); ++i) {
    if (run[i] == reference[i]) continue;  // also -inf against -inf, whose difference is NaN
    const double apart = static_cast<double>(run[i]) - static_cast<double>(reference[i]);
    out.max_abs = std::max(out.max_abs, std::abs(apart));
  }
  for (float v : reference) {
    if (std::isfinite(v)) scale = std::max(scale, std::abs(static_cast<double>(v)));
  }
  if (out.max_abs > 0) out.max_rel = scale > 0 ? out.max_abs / scale : kInfinity;

  const std::vector<std::size_t> ours = top_ids(run, 5);
  const std::vector<std::size_t> theirs = top_ids(reference, 5);
  out.same = ours[0] == theirs[0];
  out.margin = theirs.size() < 2 ? kInfinity
                                 : static_cast<double>(reference[theirs[0]]) -
                                       static_cast<double>(reference[theirs[1]]);
  std::size_t shared = 0;
  for (std::size_t id : theirs) shared += std::find(ours.begin(), ours.end(), id) != ours.end();
  out.top5 = static_cast<double>(shared) / static_cast<double>(theirs.size());
  return out;
}

LogitComparer::LogitComparer(std::int64_t n_vocab, double margin_tol, int n_thread)
    : n_vocab_(n_vocab), margin_tol_(margin_tol), n_thread_(n_thread) {
  if (n_vocab < 1) throw std::invalid_argument(fmt::format("vocabulary of {} tokens", n_vocab));
  if (!(margin_tol >= 0)) throw std::invalid_argument(fmt::format("margin of {}", margin_tol));
  sums_.n_vocab = n_vocab;
}

void LogitComparer::add(std::span<const float> run, std::span<const float> reference) {
  const auto width = static_cast<std::size_t>(n_vocab_);
  if (run.size() != reference.size() || run.size() % width != 0) {
    throw std::invalid_argument(
        fmt::format("{} logits against {}: not the same number of rows of {}", run.size(),
                    reference.size(), width));
  }
  const std::size_t n = run.size() / width;
  std::vector<RowComparison> rows(n);
  std::vector<std::exception_ptr> troubles(n);
  const auto every_nth = [&](std::size_t from, std::size_t step) {
    for (std::size_t i = from; i < n; i += step) {
      try {
        rows[i] = compare_row(run.subspan(i * width, width), reference.subspan(i * width, width));
      } catch (...) {
        troubles[i] = std::current_exception();
      }
    }
  };
  const auto n_thread = std::min(static_cast<std::size_t>(std::max(1, n_thread_)), n);
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < n_thread; ++i) others.emplace_back(every_nth, i, n_thread);
    every_nth(0, n_thread);
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (troubles[i]) rethrow_at(sums_.n_row, troubles[i]);
    add(rows[i]);
  }
}

void LogitComparer::add(const RowComparison& row) {
  const std::int64_t at = sums_.n_row++;
  klds_.push_back(row.kld);
  kld_sum_ += row.kld;
  if (sums_.kld_max_row < 0 || row.kld > sums_.kld_max) {
    sums_.kld_max = row.kld;
    sums_.kld_max_row = at;
  }
  if (sums_.max_abs_row < 0 || row.max_abs > sums_.max_abs) {
    sums_.max_abs = row.max_abs;
    sums_.max_abs_row = at;
  }
  sums_.max_rel = std::max(sums_.max_rel, row.max_rel);
  n_top1_ += row.same;
  if (row.margin > margin_tol_) {
    ++sums_.n_decided;
    n_top1_decided_ += row.same;
  }
  top5_sum_ += row.top5;
}

LogitComparison LogitComparer::result() const {
  LogitComparison out = sums_;
  if (out.n_row == 0) return out;
  const auto n = static_cast<double>(out.n_row);
  out.kld_mean = kld_sum_ / n;
  std::vector<double> sorted = klds_;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t half = sorted.size() / 2;
  out.kld_median = sorted.size() % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  out.top1 = static_cast<double>(n_top1_) / n;
  if (out.n_decided > 0) {
    out.top1_decided = static_cast<double>(n_top1_decided_) / static_cast<double>(out.n_decided);
  }
  out.top5 = top5_sum_ / n;
  return out;
}

}  // namespace k3
