#include "rank/eval.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

namespace {

using k3::LogitComparer;
using k3::LogitComparison;

LogitComparison compare(const std::vector<float>& run, const std::vector<float>& ref,
                        std::int64_t n_vocab, double margin_tol = 0) {
  LogitComparer c(n_vocab, margin_tol);
  c.add(run, ref);
  return c.result();
}

float ln(double x) { return static_cast<float>(std::log(x)); }

TEST_CASE(
    "log_softmax is a normalised distribution, also where exp overflows in float and in double") {
  const std::vector<float> x{1000, 1001, -2000, 999};
  std::vector<double> y(4);
  k3::log_softmax(x, y);
  double sum = 0;
  for (double v : y) sum += std::exp(v);
  CHECK(sum == doctest::Approx(1).epsilon(1e-12));
  CHECK(y[1] - y[0] == doctest::Approx(1).epsilon(1e-12));
}

TEST_CASE("equal logits have divergence zero and agree in everything") {
  const std::vector<float> x{1, 2, 3, 4, 5, 6, 0.5, -1};
  const LogitComparison c = compare(x, x, 4);
  CHECK(c.n_row == 2);
  CHECK(c.kld_mean == 0);
  CHECK(c.kld_max == 0);
  CHECK(c.top1 == 1);
  CHECK(c.top5 == 1);
  CHECK(c.max_abs == 0);
}

TEST_CASE(
    "a constant added to a run's logits changes the largest difference but not the divergence") {
  const std::vector<float> ref{1, 2, 3, 4};
  const std::vector<float> run{3, 4, 5, 6};
  const LogitComparison c = compare(run, ref, 4);
  CHECK(c.kld_mean == doctest::Approx(0).epsilon(1e-15));
  CHECK(c.max_abs == 2);
  CHECK(c.max_rel == 0.5);
  CHECK(c.top1 == 1);
}

TEST_CASE("the divergence is of the run from the reference: p log(p/q) with p the reference") {
  const std::vector<float> ref{ln(0.5), ln(0.5)};
  const std::vector<float> run{ln(0.9), ln(0.1)};
  const double forward = 0.5 * std::log(0.5 / 0.9) + 0.5 * std::log(0.5 / 0.1);
  const double backward = 0.9 * std::log(0.9 / 0.5) + 0.1 * std::log(0.1 / 0.5);
  CHECK(compare(run, ref, 2).kld_mean == doctest::Approx(forward).epsilon(1e-6));
  CHECK(std::abs(forward - backward) > 0.1);  // so the other direction would have failed
}

TEST_CASE(
    "mean, median and largest divergence over rows are three numbers, and the worst row is named") {
  LogitComparer c(2);
  const std::vector<float> even{0, 0};
  c.add(std::vector<float>{0, 0}, even);
  c.add(std::vector<float>{0, 3}, even);
  c.add(std::vector<float>{0, 1}, even);
  const LogitComparison r = c.result();
  const auto kld = [](double d) { return std::log((1 + std::exp(d)) / 2) - d / 2; };
  CHECK(r.kld_median == doctest::Approx(kld(1)));
  CHECK(r.kld_max == doctest::Approx(kld(3)));
  CHECK(r.kld_max_row == 1);
  CHECK(r.kld_mean == doctest::Approx((kld(1) + kld(3)) / 3));
  CHECK(r.max_abs_row == 1);
}

TEST_CASE("an even number of rows has the mean of the middle two as median") {
  LogitComparer c(2);
  const std::vector<float> even{0, 0};
  for (float d : {0.0f, 0.0f, 2.0f, 4.0f}) c.add(std::vector<float>{0, d}, even);
  const double kld2 = std::log((1 + std::exp(2.0)) / 2) - 1;
  CHECK(c.result().kld_median == doctest::Approx(kld2 / 2));
}

TEST_CASE("rows that the reference hardly decides do not count for top1_decided") {
  // Row 0: decided by 2 and equal; row 1: decided by 0.01 and different.
  const std::vector<float> ref{0, 2, 1.01f, 1};
  const std::vector<float> run{0, 2, 1, 1.01f};
  const LogitComparison c = compare(run, ref, 2, 0.1);
  CHECK(c.top1 == 0.5);
  CHECK(c.top1_decided == 1);
  CHECK(c.n_decided == 1);
  CHECK(compare(run, ref, 2, 0).top1_decided == 0.5);
}

TEST_CASE("top5 counts the reference's five among the run's, whatever their order") {
  const std::vector<float> ref{9, 8, 7, 6, 5, 4, 3};
  const std::vector<float> shuffled{5, 6, 7, 8, 9, 4, 3};
  const std::vector<float> one_out{9, 8, 7, 6, 4, 5, 3};
  CHECK(compare(shuffled, ref, 7).top5 == 1);
  CHECK(compare(one_out, ref, 7).top5 == doctest::Approx(0.8));
  CHECK(compare(shuffled, ref, 7).top1 == 0);
}

TEST_CASE("equal logits are ordered by id, so a tie is no disagreement") {
  const std::vector<float> ref{1, 1, 0};
  CHECK(compare({1, 1, 0}, ref, 3).top1 == 1);
  CHECK(compare({1, 1.5f, 0}, ref, 3).top1 == 0);
}

TEST_CASE("a token that the reference allows and the run forbids makes the divergence infinite") {
  const float forbidden = -std::numeric_limits<float>::infinity();
  CHECK(std::isinf(compare({0, forbidden}, {0, 0}, 2).kld_max));
  const LogitComparison both = compare({0, forbidden}, {0, forbidden}, 2);
  CHECK(both.kld_max == 0);
  CHECK(both.max_abs == 0);
}

TEST_CASE("NaN and +inf are refused with side, row and token") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  LogitComparer c(2);
  c.add(std::vector<float>{0, 0}, std::vector<float>{0, 0});
  CHECK_THROWS_WITH_AS(c.add(std::vector<float>{0, nan}, std::vector<float>{0, 0}),
                       "row 1: run: token 1: logit is nan", std::invalid_argument);
  CHECK_THROWS_WITH_AS(c.add(std::vector<float>{0, 0},
                             std::vector<float>{std::numeric_limits<float>::infinity(), 0}),
                       "row 1: reference: token 0: logit is inf", std::invalid_argument);
}

TEST_CASE("rows of another length are refused") {
  LogitComparer c(3);
  CHECK_THROWS_AS(c.add(std::vector<float>(4), std::vector<float>(4)), std::invalid_argument);
  CHECK_THROWS_AS(c.add(std::vector<float>(6), std::vector<float>(3)), std::invalid_argument);
  CHECK_THROWS_AS(LogitComparer(0), std::invalid_argument);
}

}  // namespace
