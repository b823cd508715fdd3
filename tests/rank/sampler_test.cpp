#include "rank/sampler.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/sampling.h"

using namespace k3;
using Logits = std::vector<float>;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Logits random_logits(std::size_t n, unsigned seed, float deviation = 3) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> d(0, deviation);
  Logits l(n);
  for (auto& x : l) x = d(rng);
  return l;
}

// Band r of n over the vocabulary; where there are more bands than tokens some are empty.
std::vector<CandidateResult> ask(const Logits& logits, int bands, const CandidateQuery& q) {
  std::vector<CandidateResult> results;
  const auto n = static_cast<std::int64_t>(logits.size());
  for (std::int64_t r = 0; r < bands; ++r) {
    const std::int64_t begin = n * r / bands;
    const std::int64_t end = n * (r + 1) / bands;
    results.push_back(search_candidates(logits.data() + begin, end - begin, begin, q));
  }
  return results;
}

struct Drawn {
  Decision decision;
  int rounds = 0;
};

Drawn draw(const Logits& logits, int bands, const SamplerOptions& o, std::uint64_t number) {
  CandidateQuery q = first_query(o, number);
  for (int rounds = 1; rounds < 30; ++rounds) {
    const Decision d = decide(o, q, ask(logits, bands, q));
    if (d.kind != Decision::Kind::kNeedMore) return {d, rounds};
    REQUIRE(d.next.n > q.n);
    q = d.next;
  }
  FAIL("never decided");
  return {};
}

// The kept tokens and their probabilities, from the definition: sort everything, cut three times.
std::vector<std::pair<std::int32_t, double>> kept_by_definition(const Logits& logits,
                                                                const SamplerOptions& o) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto at = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
  std::stable_sort(ids.begin(), ids.end(), [&](auto a, auto b) { return at(a) > at(b); });
  const auto keep = [&](std::size_t n) { ids.resize(std::min(n, ids.size())); };
  const auto probabilities = [&] {
    std::vector<double> p;
    for (const auto id : ids)
      p.push_back(std::exp((static_cast<double>(at(id)) - at(ids[0])) / o.temp));
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (auto& x : p) x /= sum;
    return p;
  };
  if (o.top_k > 0) keep(static_cast<std::size_t>(o.top_k));
  auto p = probabilities();
  if (o.top_p < 1) {
    double sum = 0;
    std::size_t n = 0;
    while (n < p.size() && sum < o.top_p) sum += p[n++];
    keep(std::max<std::size_t>(n, 1));
    p = probabilities();
  }
  std::size_t n = 0;
  while (n < p.size() && p[n] >= o.min_p * p[0]) ++n;
  keep(n);
  p = probabilities();
  std::vector<std::pair<std::int32_t, double>> out;
  for (std::size_t i = 0; i < ids.size(); ++i) out.emplace_back(ids[i], p[i]);
  return out;
}

// Pearson's statistic of n_draw draws against the exact distribution over the kept tokens, in
// standard deviations of the chi-square distribution from its mean; cells of less than 8 expected
// draws are one cell.
double chi_square(const Logits& logits, const SamplerOptions& o, int n_draw) {
  std::vector<double> count(logits.size(), 0);
  for (int i = 0; i < n_draw; ++i) {
    count[static_cast<std::size_t>(
        draw(logits, 2, o, static_cast<std::uint64_t>(i)).decision.id)] += 1;
  }
  double statistic = 0, rest_seen = 0, rest_expected = 0;
  int cells = 0;
  double in_cells = 0;
  for (const auto& [id, p] : kept_by_definition(logits, o)) {
    const double seen = count[static_cast<std::size_t>(id)];
    in_cells += seen;
    if (p * n_draw < 8) {
      rest_seen += seen;
      rest_expected += p * n_draw;
    } else {
      statistic += (seen - p * n_draw) * (seen - p * n_draw) / (p * n_draw);
      ++cells;
    }
  }
  CHECK(in_cells == n_draw);  // nothing outside the kept set was ever drawn
  if (rest_expected > 0) {
    statistic += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
    ++cells;
  }
  REQUIRE(cells > 3);
  return (statistic - (cells - 1)) / std::sqrt(2.0 * (cells - 1));
}

std::string refusal(const SamplerOptions& o) {
  try {
    validate(o);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

SamplerOptions options(float temp, std::int32_t top_k = 0, float top_p = 1, float min_p = 0,
                       std::uint64_t seed = 1) {
  SamplerOptions o;
  o.temp = temp;
  o.top_k = top_k;
  o.top_p = top_p;
  o.min_p = min_p;
  o.seed = seed;
  return o;
}

}  // namespace

TEST_CASE("greedy takes the highest logit, of equals the lower id, whatever the bands") {
  Logits l(50, 0.0f);
  l[7] = l[30] = l[49] = 5;
  for (int bands : {1, 2, 3, 8, 64}) {
    const Decision d = draw(l, bands, options(0), 0).decision;
    CHECK(d.id == 7);
    CHECK(d.margin == 0);
    l[30] = 4.5;
    l[49] = 3;
    CHECK(draw(l, bands, options(0), 0).decision.margin == 0.5f);
    l[30] = l[49] = 5;
  }
}

TEST_CASE("log-sum-exp and log-probability are those of the whole vocabulary at temperature 1") {
  const Logits l = random_logits(1000, 3);
  double sum = 0;
  for (const float x : l) sum += std::exp(static_cast<double>(x));
  for (const auto& o :
       {options(0), options(1), options(0.5f), options(2, 5), options(0.7f, 0, 0.9f)}) {
    for (int bands : {1, 3, 8}) {
      const Decision d = draw(l, bands, o, 4).decision;
      CHECK(d.lse == doctest::Approx(std::log(sum)).epsilon(1e-12));
      CHECK(d.logit == l[static_cast<std::size_t>(d.id)]);
      CHECK(d.logprob == doctest::Approx(d.logit - std::log(sum)).epsilon(1e-12));
    }
  }
}

TEST_CASE("the token drawn does not depend on how the vocabulary is cut") {
  Logits normal = random_logits(700, 1);
  Logits flat(700, 1.0f);
  Logits tied = random_logits(700, 2);
  for (auto& x : tied) x = std::round(x);
  Logits ruled_out = normal;
  for (std::size_t i = 0; i < 500; ++i) ruled_out[i] = -kInf;
  const std::vector<SamplerOptions> settings = {options(0),
                                                options(1),
                                                options(0.001f),
                                                options(100),
                                                options(1, 1),
                                                options(1, 3),
                                                options(1, 0, 0.95f),
                                                options(0.5f, 0, 0.5f),
                                                options(2, 0, 0.999f),
                                                options(1, 0, 1, 0.05f),
                                                options(1, 40, 0.9f),
                                                options(1, 699, 0.99f),
                                                options(1, 5000),
                                                options(1, 20, 0.8f, 0.1f)};
  for (const auto& l : {normal, flat, tied, ruled_out}) {
    for (auto o : settings) {
      std::set<std::int32_t> seen;
      for (std::uint64_t n = 0; n < 12; ++n) {
        o.seed = n * 77;
        const Decision one = draw(l, 1, o, n).decision;
        for (int bands : {2, 3, 8}) {
          const Decision d = draw(l, bands, o, n).decision;
          CHECK(d.id == one.id);
          CHECK(d.margin == one.margin);
        }
        CHECK(std::isfinite(l[static_cast<std::size_t>(one.id)]));
        seen.insert(one.id);
      }
      // A sampler that ignored seed and draw would agree across bands as well.
      if (o.temp == 1 && o.top_k != 1) CHECK(seen.size() > 1);
    }
  }
}

TEST_CASE("draws follow the exact probabilities") {
  const Logits l = random_logits(60, 9, 1);
  // 4 deviations: a wrong set or temperature is tens of them off, chance is there once in some
  // thousand seeds.
  CHECK(std::abs(chi_square(l, options(1), 20'000)) < 4);
  CHECK(std::abs(chi_square(l, options(0.6f), 20'000)) < 4);
  CHECK(std::abs(chi_square(l, options(1.7f), 20'000)) < 4);
  CHECK(std::abs(chi_square(l, options(1, 7), 20'000)) < 4);
  CHECK(std::abs(chi_square(l, options(0.8f, 0, 0.85f), 20'000)) < 4);
  CHECK(std::abs(chi_square(l, options(1.3f, 0, 1, 0.1f), 20'000)) < 4);
  CHECK(std::abs(chi_square(l, options(1.3f, 30, 0.9f, 0.05f), 20'000)) < 4);
}

TEST_CASE("the test of the draws sees a slightly wrong temperature") {
  const Logits l = random_logits(60, 9, 2);
  Logits scaled = l;
  for (auto& x : scaled) x *= 1.1f;
  double statistic = 0;
  const SamplerOptions o = options(1);
  std::vector<double> count(l.size(), 0);
  for (std::uint64_t i = 0; i < 20'000; ++i)
    count[static_cast<std::size_t>(draw(scaled, 2, o, i).decision.id)] += 1;
  for (const auto& [id, p] : kept_by_definition(l, o)) {
    const double e = p * 20'000;
    statistic +=
        (count[static_cast<std::size_t>(id)] - e) * (count[static_cast<std::size_t>(id)] - e) / e;
  }
  CHECK((statistic - 59) / std::sqrt(2.0 * 59) > 8);
}

TEST_CASE("a kept set larger than the first query is completed by further queries") {
  const Logits flat = random_logits(5000, 4, 0.1f);
  const SamplerOptions o = options(1, 0, 0.9f);
  std::set<std::int32_t> kept;
  for (const auto& [id, p] : kept_by_definition(flat, o)) kept.insert(id);
  REQUIRE(kept.size() > 4000);
  std::set<std::int32_t> seen;
  for (std::uint64_t n = 0; n < 300; ++n) {
    const Drawn d = draw(flat, 4, o, n);
    CHECK(d.rounds > 1);
    CHECK(kept.count(d.decision.id) == 1);
    seen.insert(d.decision.id);
  }
  // A sampler that drew from the 4 x 64 candidates of the first query would see at most 256.
  CHECK(seen.size() > 270);
}

TEST_CASE("a peaked distribution needs one query, and k candidates prove top-k") {
  Logits l = random_logits(5000, 4, 1);
  l[123] = 30;
  CHECK(draw(l, 4, options(1, 0, 0.95f), 0).rounds == 1);
  CHECK(draw(l, 4, options(1), 0).rounds == 1);
  CHECK(draw(l, 4, options(1, 500), 0).rounds == 1);
  CHECK(draw(l, 4, options(1, 500, 0.9f, 0.01f), 0).rounds == 1);
  CHECK(first_query(options(1, 500), 9).n == 500);
  CHECK(first_query(options(0), 9).n == 2);
  CHECK(first_query(options(1), 9).n == 2);
}

TEST_CASE("candidates of one rank only do not prove what another still holds") {
  // Band 0 holds the 64 best and more; band 1's best come after them. The kept set is 80 of band 0.
  Logits l(400, -50.0f);
  for (int i = 0; i < 80; ++i) l[static_cast<std::size_t>(i)] = 1;
  const SamplerOptions o = options(1, 0, 0.999f);
  std::set<std::int32_t> seen;
  for (std::uint64_t n = 0; n < 500; ++n) seen.insert(draw(l, 2, o, n).decision.id);
  CHECK(*seen.rbegin() >= 64);
  CHECK(*seen.rbegin() < 80);
}

TEST_CASE("filters that keep everything draw what no filter draws") {
  const Logits l = random_logits(300, 8);
  for (std::uint64_t n = 0; n < 50; ++n) {
    const auto want = draw(l, 2, options(0.9f), n).decision.id;
    CHECK(draw(l, 3, options(0.9f, 300), n).decision.id == want);
    CHECK(draw(l, 3, options(0.9f, 0, 1, 1e-30f), n).decision.id == want);
  }
}

TEST_CASE("top-p renormalises over what top-k left") {
  const Logits l = {3, 2.9f, 2.8f, 2.7f, 2.6f, 2.5f};
  // Of all six the first two have 0.41, short of 0.45; of the first three they have 0.7.
  const auto kept = [&](const SamplerOptions& o) {
    std::set<std::int32_t> seen;
    for (std::uint64_t n = 0; n < 400; ++n) seen.insert(draw(l, 2, o, n).decision.id);
    return seen.size();
  };
  CHECK(kept(options(1, 0, 0.45f)) == 3);
  CHECK(kept(options(1, 3, 0.45f)) == 2);
}

TEST_CASE("the first token survives every filter, and its margin is infinite where it is alone") {
  const Logits l = random_logits(100, 5);
  const auto best = static_cast<std::int32_t>(std::max_element(l.begin(), l.end()) - l.begin());
  for (const auto& o : {options(1, 1), options(1, 0, 1e-6f), options(1, 0, 1, 1)}) {
    const Decision d = draw(l, 3, o, 2).decision;
    CHECK(d.id == best);
    CHECK(d.margin == kInf);
  }
}

TEST_CASE("a NaN or an infinity is reported, wherever it is") {
  for (const float bad : {kNan, kInf}) {
    Logits l = random_logits(100, 5);
    l[60] = bad;
    for (const auto& o : {options(0), options(1), options(1, 0, 0.9f)}) {
      for (int bands : {1, 3})
        CHECK(draw(l, bands, o, 0).decision.kind == Decision::Kind::kNotFinite);
    }
  }
  const CandidateResult r = search_candidates(&kNan, 1, 10, CandidateQuery{});
  REQUIRE(r.best.size() == 1);
  CHECK(r.best[0].id == -1);
  CHECK(draw(Logits(9, -kInf), 2, options(1), 0).decision.kind == Decision::Kind::kNotFinite);
  CHECK_THROWS_AS(decide(options(0), first_query(options(0), 0), std::vector<CandidateResult>(3)),
                  std::invalid_argument);
}

TEST_CASE("a band's search returns the best in order, with the band's sums") {
  const Logits l = {1, 4, 2, 4, -kInf};
  CandidateQuery q;
  q.n = 3;
  const CandidateResult r = search_candidates(l.data(), 5, 100, q);
  REQUIRE(r.best.size() == 3);
  CHECK(r.best[0].id == 101);
  CHECK(r.best[1].id == 103);
  CHECK(r.best[2].id == 102);
  CHECK(r.best[2].key == 2);
  CHECK(r.max_logit == 4);
  CHECK(r.sum_exp == doctest::Approx(2 + std::exp(-3.0) + std::exp(-2.0)));
  CHECK(r.sum_exp_scaled == r.sum_exp);
  q.n = 99;
  q.inv_temperature = 2;
  const CandidateResult all = search_candidates(l.data(), 5, 100, q);
  CHECK(all.best.size() == 5);
  CHECK(all.sum_exp_scaled == doctest::Approx(2 + std::exp(-6.0) + std::exp(-4.0)));
  for (const auto& c : all.best) CHECK(c.key == c.logit * 2 + gumbel_noise(0, 0, c.id));
  q.by_logit = true;
  CHECK(search_candidates(l.data(), 5, 100, q).best[0].id == 101);
  CHECK(search_candidates(l.data(), 5, 100, q).sum_exp_scaled == all.sum_exp_scaled);
  const CandidateResult none = search_candidates(nullptr, 0, 7, q);
  CHECK(none.best.empty());
  CHECK(none.sum_exp == 0);
  CHECK(none.max_logit == -kInf);
}

TEST_CASE("the noise is Gumbel's, and depends on seed, draw and id alone") {
  CHECK(gumbel_noise(1, 2, 3) == gumbel_noise(1, 2, 3));
  std::set<float> distinct;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (std::uint64_t number = 0; number < 10; ++number) {
      for (std::int32_t id = 0; id < 10; ++id) distinct.insert(gumbel_noise(seed, number, id));
    }
  }
  CHECK(distinct.size() > 990);  // (seed, draw, id) are not merely added up
  // Mean 0.5772, variance pi^2/6; P(g > x) = 1 - exp(-exp(-x)).
  const int n = 200'000;
  double sum = 0, squares = 0;
  int over_5 = 0, over_10 = 0, under_minus_1 = 0;
  for (std::int32_t id = 0; id < n; ++id) {
    const double g = gumbel_noise(42, 0, id);
    REQUIRE(std::isfinite(g));
    sum += g;
    squares += g * g;
    over_5 += g > 5;
    over_10 += g > 10;
    under_minus_1 += g < -1;
  }
  CHECK(sum / n == doctest::Approx(0.5772).epsilon(0.02));
  CHECK(squares / n - sum / n * sum / n == doctest::Approx(1.6449).epsilon(0.02));
  CHECK(over_5 == doctest::Approx(n * 0.0067153).epsilon(0.1));
  CHECK(under_minus_1 == doctest::Approx(n * 0.0659880).epsilon(0.05));
  CHECK(over_10 < 30);  // 9 expected
  // Both ends of the generator are finite, and the upper tail is not a coarse grid.
  std::set<float> tail;
  for (std::int32_t id = 0; id < 2'000'000; ++id) {
    const float g = gumbel_noise(7, 1, id);
    if (g > 9) tail.insert(g);
  }
  CHECK(tail.size() > 150);  // 247 expected
}

TEST_CASE("penalties fall on each token of the history once, in this band only") {
  Logits l = {2, -2, 0, 5};
  const std::vector<std::int32_t> history = {10, 11, 10, 12, 99, 3, -1};
  penalise_logits(l.data(), 4, 10, history.data(), 7, 2, 0);
  CHECK(l == Logits{1, -4, 0, 5});
  penalise_logits(l.data(), 4, 10, history.data(), 7, 1, 0.5f);
  CHECK(l == Logits{0.5f, -4.5f, -0.5f, 5});
  penalise_logits(l.data(), 4, 10, nullptr, 0, 2, 1);
  CHECK(l == Logits{0.5f, -4.5f, -0.5f, 5});
  CHECK_FALSE(options(1).penalises());
  SamplerOptions o;
  o.presence_penalty = 0.1f;
  CHECK(o.penalises());
}

TEST_CASE("an option out of range is refused with its name, value and range") {
  CHECK(refusal({}).empty());
  CHECK(refusal(options(0)).empty());
  CHECK(refusal(options(-1)) == "--temp -1: must be 0 (greedy) or from 0.001 to 100");
  CHECK(refusal(options(0.0001f)).find("--temp 0.0001") == 0);
  CHECK(refusal(options(kNan)).find("--temp nan") == 0);
  CHECK(refusal(options(kInf)).find("--temp inf") == 0);
  CHECK(refusal(options(1, -1)).find("--top-k -1") == 0);
  CHECK(refusal(options(1, 0, 0)).find("--top-p 0:") == 0);
  CHECK(refusal(options(1, 0, 1.5f)).find("--top-p 1.5") == 0);
  CHECK(refusal(options(1, 0, 1, -0.5f)).find("--min-p -0.5") == 0);
  CHECK(refusal(options(1, 0, 1, 1.5f)).find("--min-p 1.5") == 0);
  SamplerOptions o;
  o.repetition_penalty = 0;
  CHECK(refusal(o).find("--repetition-penalty 0:") == 0);
  o = {};
  o.presence_penalty = kNan;
  CHECK(refusal(o).find("--presence-penalty nan") == 0);
}
