// The float functions of kernels/cpu/elementary.h against double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/elementary.h"

namespace k3::cpu {
namespace {

// Units in the last place of `want` as a float.
double ulps(float got, double want) {
  const float f = static_cast<float>(want);
  if (got == f) return 0;
  const float next = std::nextafter(std::abs(f), std::numeric_limits<float>::infinity());
  return std::abs(got - want) / (static_cast<double>(next) - std::abs(f));
}

template <class F, class G>
double worst_ulps(float from, float to, F&& f, G&& g) {
  double worst = 0;
  for (int i = 0; i <= 200000; ++i) {
    const float x = from + (to - from) * (static_cast<float>(i) / 200000.0f);
    worst = std::max(worst, ulps(f(x), g(static_cast<double>(x))));
  }
  return worst;
}

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

double true_exp(double x) { return std::exp(x); }
double true_tanh(double x) { return std::tanh(x); }
double true_sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

TEST_CASE("exp is within two units in the last place, from overflow to underflow") {
  CHECK(worst_ulps(-87, 88.7f, exp_f32, true_exp) <= 2);
  CHECK(worst_ulps(-1, 1, exp_f32, true_exp) <= 2);
  CHECK(worst_ulps(-103, -87, exp_f32, true_exp) <= 2);  // subnormal
  CHECK(exp_f32(0.0f) == 1.0f);
  CHECK(exp_f32(90.0f) == kInf);
  CHECK(exp_f32(kInf) == kInf);
  CHECK(exp_f32(-kInf) == 0.0f);
  CHECK(exp_f32(-1e30f) == 0.0f);
  CHECK(std::isnan(exp_f32(kNaN)));
}

TEST_CASE("tanh is within two units in the last place, odd, and ends at one") {
  CHECK(worst_ulps(-10, 10, tanh_f32, true_tanh) <= 2);
  CHECK(worst_ulps(-0.7f, 0.7f, tanh_f32, true_tanh) <= 2);
  CHECK(worst_ulps(-1e-6f, 1e-6f, tanh_f32, true_tanh) <= 1);
  CHECK(tanh_f32(50.0f) == 1.0f);
  CHECK(tanh_f32(kInf) == 1.0f);
  CHECK(tanh_f32(-kInf) == -1.0f);
  CHECK(tanh_f32(-0.3f) == -tanh_f32(0.3f));
  CHECK(std::isnan(tanh_f32(kNaN)));
}

TEST_CASE("the logistic function is within three units in the last place and reaches both ends") {
  CHECK(worst_ulps(-80, 20, sigmoid, true_sigmoid) <= 3);
  CHECK(sigmoid(0.0f) == 0.5f);
  CHECK(sigmoid(kInf) == 1.0f);
  CHECK(sigmoid(-kInf) == 0.0f);
  CHECK(std::isnan(sigmoid(kNaN)));
}

}  // namespace k3::cpu
