#include "rank/agreement.h"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

using namespace k3;
using Ids = std::vector<std::int32_t>;

namespace {

void add(GreedyAgreement& a, const Ids& reference, const Ids& run) {
  a.begin_sequence();
  for (std::size_t i = 0; i < reference.size(); ++i) a.add(reference[i], run[i]);
}

}  // namespace

TEST_CASE("Wilson's interval has the published values, and a width where all or none hit") {
  // 10 of 10, 0 of 10: the other bound is z^2 / (n + z^2).
  const Interval all = wilson_interval(10, 10), none = wilson_interval(0, 10);
  CHECK(all.high == 1);
  CHECK(all.low == doctest::Approx(0.72246).epsilon(1e-4));
  CHECK(none.low == 0);
  CHECK(none.high == doctest::Approx(0.27753).epsilon(1e-4));
  const Interval half = wilson_interval(5, 10);
  CHECK(half.low == doctest::Approx(0.23659).epsilon(1e-4));
  CHECK(half.high == doctest::Approx(0.76341).epsilon(1e-4));
  // 81 of 263: Newcombe (1998), example of method 3.
  const Interval newcombe = wilson_interval(81, 263);
  CHECK(newcombe.low == doctest::Approx(0.2553).epsilon(2e-4));
  CHECK(newcombe.high == doctest::Approx(0.3662).epsilon(2e-4));
  const Interval nothing = wilson_interval(0, 0);
  CHECK(nothing.low == 0);
  CHECK(nothing.high == 1);
}

TEST_CASE("free texts are compared up to their first difference, forced ones at every step") {
  const Ids reference = {1, 2, 3, 4, 5, 6};
  const Ids run = {1, 2, 9, 4, 5, 8};
  GreedyAgreement free(false), forced(true);
  add(free, reference, run);
  add(forced, reference, run);
  CHECK(free.n_position() == 6);
  CHECK(free.n_step() == 3);
  CHECK(free.n_equal() == 2);
  CHECK(free.divergences().size() == 1);
  CHECK(forced.n_step() == 6);
  CHECK(forced.n_equal() == 4);
  CHECK(forced.share() == doctest::Approx(4.0 / 6));
  REQUIRE(forced.divergences().size() == 2);
  CHECK(forced.divergences()[1].position == 5);
  CHECK(forced.divergences()[1].run == 8);
  CHECK(std::isnan(forced.divergences()[1].margin));
  for (const GreedyAgreement* a : {&free, &forced}) {
    CHECK(a->first_divergence().at(0) == 2);
    CHECK(a->until_divergence() == doctest::Approx(2.0 / 6));
  }
}

TEST_CASE("sequences count on their own, and all of them together") {
  GreedyAgreement a(false);
  add(a, {1, 2, 3}, {1, 2, 3});
  add(a, {1, 2, 3}, {7, 2, 3});
  CHECK(a.n_sequence() == 2);
  CHECK(a.n_sequence_equal() == 1);
  CHECK(a.n_step() == 4);
  CHECK(a.n_equal() == 3);
  CHECK_FALSE(a.first_divergence()[0].has_value());
  CHECK(a.first_divergence()[1] == 0);
  CHECK(a.until_divergence() == doctest::Approx(0.5));
}

TEST_CASE("many differences are all counted and a few are kept") {
  GreedyAgreement a(true);
  a.begin_sequence();
  for (int i = 0; i < 1000; ++i) a.add(i, i + 1);
  CHECK(a.n_equal() == 0);
  CHECK(a.n_step() == 1000);
  CHECK(a.divergences().size() == GreedyAgreement::kMostDivergences);
}
