// How far one set of logits lies from another. Pure arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace k3 {

// log softmax in double: y[i] = x[i] - max - log(sum exp(x - max)). -infinity is a legal logit, NaN and +infinity are not:
// std::invalid_argument names the first.
void log_softmax(std::span<const float> x, std::span<double> y);

// KLD(reference || run) = sum_i p_i * (log p_i - log q_i), p from the reference; nats; infinite where the run forbids what
// the reference allows.
double kl_divergence(std::span<const double> log_p, std::span<const double> log_q);

struct LogitComparison {
  std::int64_t n_row = 0;
  std::int64_t n_vocab = 0;
  double kld_mean = 0;
  double kld_median = 0;
  double kld_max = 0;
  std::int64_t kld_max_row = -1;
  // Rows of which the likeliest token is the same (ties: lower id), as a share of all rows; and of the rows that the
  // reference decides by more than `margin_tol` in logits (1 when there are none).
  double top1 = 0;
  double top1_decided = 1;
  std::int64_t n_decided = 0;
  double top5 =
      0;  // mean share of the reference's five likeliest tokens that are among the run's five
  double max_abs = 0;  // largest difference of two logits
  double max_rel = 0;  // the same over the row's largest absolute reference logit
  std::int64_t max_abs_row = -1;
};

// What one row adds to it.
struct RowComparison {
  double kld = 0;
  double max_abs = 0;
  double max_rel = 0;
  double top5 = 0;
  double margin = 0;  // the reference's two largest logits apart
  bool same = false;  // top 1
};
RowComparison compare_row(std::span<const float> run, std::span<const float> reference);

// Rows arrive in any portions; memory grows by one double a row.
class LogitComparer {
 public:
  // n_thread: that share the rows of one add(). Throws std::invalid_argument for n_vocab < 1 or a negative margin.
  explicit LogitComparer(std::int64_t n_vocab, double margin_tol = 0, int n_thread = 1);

  // Whole rows of both, [n_row, n_vocab]. Throws std::invalid_argument for other lengths, and for logits that are NaN or
  // +infinity, naming row and column.
  void add(std::span<const float> run, std::span<const float> reference);

  LogitComparison result() const;
  std::span<const double> klds() const { return klds_; }  // by row

 private:
  void add(const RowComparison& row);

  std::int64_t n_vocab_;
  double margin_tol_;
  int n_thread_;
  LogitComparison sums_;
  double kld_sum_ = 0;
  double top5_sum_ = 0;
  std::int64_t n_top1_ = 0;
  std::int64_t n_top1_decided_ = 0;
  std::vector<double> klds_;
};

}  // namespace k3
