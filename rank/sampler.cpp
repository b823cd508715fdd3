#include "rank/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

namespace k3 {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int32_t kFirstFiltered = 64;  // candidates per rank: enough for top_p on most texts
constexpr std::int32_t kMaxQuery = std::numeric_limits<std::int32_t>::max() / 8;

bool greedy(const SamplerOptions& o) { return o.temp == 0; }
bool filtered(const SamplerOptions& o) { return o.top_k > 0 || o.top_p < 1 || o.min_p > 0; }

bool better(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}

template <class T>
void require(bool holds, const char* option, T value, const char* range) {
  // NaN holds nothing, so a comparison written as "inside" refuses it too.
  if (!holds) throw std::invalid_argument(fmt::format("{} {}: must be {}", option, value, range));
}

// The ranks' sums as one: of exp(logit), and of exp(logit / T), both relative to the largest logit
// of all.
struct Sums {
  double max_logit = -kInf;
  double sum_exp = 0;
  double sum_exp_scaled = 0;
};

Sums merge_sums(const CandidateQuery& asked, std::span<const CandidateResult> results) {
  Sums s;
  const double scale = asked.inv_temperature != 0 ? asked.inv_temperature : 1.0;
  for (const auto& r : results) s.max_logit = std::max<double>(s.max_logit, r.max_logit);
  for (const auto& r : results) {
    if (r.max_logit == -kInf) continue;
    const double below = r.max_logit - s.max_logit;
    s.sum_exp += r.sum_exp * std::exp(below);
    s.sum_exp_scaled += r.sum_exp_scaled * std::exp(below * scale);
  }
  return s;
}

// All candidates in order, and how many of them are known to be the first of the whole vocabulary:
// a rank that sent fewer than asked has no more; what another rank still holds comes after the last
// it sent.
struct Merged {
  std::vector<Candidate> order;
  std::size_t n_proven = 0;
  bool all = true;  // the whole vocabulary is here
};

Merged merge(const CandidateQuery& asked, std::span<const CandidateResult> results) {
  Merged m;
  const Candidate* horizon = nullptr;
  for (const auto& r : results) {
    m.order.insert(m.order.end(), r.best.begin(), r.best.end());
    if (r.best.size() < static_cast<std::size_t>(asked.n)) continue;
    m.all = false;
    if (horizon == nullptr || better(r.best.back(), *horizon)) horizon = &r.best.back();
  }
  std::sort(m.order.begin(), m.order.end(), better);
  m.n_proven = m.order.size();
  if (horizon != nullptr) {
    const auto end = std::upper_bound(m.order.begin(), m.order.end(), *horizon, better);
    m.n_proven = static_cast<std::size_t>(end - m.order.begin());
  }
  return m;
}

// How many candidates of `m` (ordered by logit) are kept, or 0 when that cannot be known from those
// proven.
std::size_t kept(const SamplerOptions& o, const Sums& sums, const Merged& m, double inv_t) {
  const bool has_k = o.top_k > 0;
  const auto k = static_cast<std::size_t>(o.top_k);
  if (has_k && m.n_proven < k && !m.all) return 0;
  const std::size_t n = has_k ? std::min(k, m.n_proven) : m.n_proven;
  const auto weight = [&](std::size_t i) {
    return std::exp((m.order[i].logit - sums.max_logit) * inv_t);
  };
  double total = sums.sum_exp_scaled;
  if (has_k) {
    total = 0;
    for (std::size_t i = 0; i < n; ++i) total += weight(i);
  }
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double w = weight(i);
    if (i > 0 && o.min_p > 0 && w < o.min_p) return i;  // the first's weight is 1
    sum += w;
    if (o.top_p < 1 && sum >= static_cast<double>(o.top_p) * total) return i + 1;
  }
  return has_k || m.all ? n : 0;
}

Decision not_finite() {
  Decision d;
  d.kind = Decision::Kind::kNotFinite;
  return d;
}

Decision more(const CandidateQuery& asked) {
  Decision d;
  d.kind = Decision::Kind::kNeedMore;
  d.next = asked;
  d.next.n = std::min(asked.n, kMaxQuery) * 4;
  return d;
}

// The best two by key of the first n.
Decision choose(std::vector<Candidate>& of, std::size_t n, const Sums& sums) {
  const auto end = of.begin() + static_cast<std::ptrdiff_t>(n);
  const auto top = of.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(2, n));
  std::partial_sort(of.begin(), top, end, better);
  Decision d;
  d.id = of[0].id;
  d.logit = of[0].logit;
  d.margin = n > 1 ? of[0].key - of[1].key : std::numeric_limits<float>::infinity();
  d.lse = sums.max_logit + std::log(sums.sum_exp);
  d.logprob = d.logit - d.lse;
  return d;
}

}  // namespace

void validate(const SamplerOptions& o) {
  require(o.temp == 0 || (o.temp >= 0.001f && o.temp <= 100), "--temp", o.temp,
          "0 (greedy) or from 0.001 to 100");
  require(o.top_k >= 0, "--top-k", o.top_k, "0 (off) or more");
  require(o.top_p > 0 && o.top_p <= 1, "--top-p", o.top_p, "over 0 and at most 1 (off)");
  require(o.min_p >= 0 && o.min_p <= 1, "--min-p", o.min_p, "from 0 (off) to 1");
  require(o.repetition_penalty > 0 && o.repetition_penalty <= 100, "--repetition-penalty",
          o.repetition_penalty, "over 0 and at most 100 (1: off)");
  require(o.presence_penalty >= -100 && o.presence_penalty <= 100, "--presence-penalty",
          o.presence_penalty, "from -100 to 100 (0: off)");
}

CandidateQuery first_query(const SamplerOptions& o, std::uint64_t draw) {
  CandidateQuery q;
  q.seed = o.seed;
  q.draw = draw;
  q.n = 2;  // the choice and the runner-up, whichever ranks hold them
  if (greedy(o)) return q;
  q.inv_temperature = 1.0f / o.temp;
  if (!filtered(o)) return q;
  q.by_logit = true;
  q.n = o.top_k > 0 ? std::clamp(o.top_k, 2, kMaxQuery) : kFirstFiltered;
  return q;
}

Decision decide(const SamplerOptions& o, const CandidateQuery& asked,
                std::span<const CandidateResult> results) {
  for (const auto& r : results) {
    if (!r.best.empty() && r.best.front().id < 0) return not_finite();
  }
  Merged m = merge(asked, results);
  if (m.order.empty())
    throw std::invalid_argument("sampler: no rank has sent a candidate: the vocabulary is empty");
  const Sums sums = merge_sums(asked, results);
  if (sums.max_logit == -kInf) return not_finite();  // every token is ruled out
  if (!asked.by_logit) return choose(m.order, m.order.size(), sums);
  const std::size_t n = kept(o, sums, m, asked.inv_temperature);
  if (n == 0) return more(asked);
  for (std::size_t i = 0; i < n; ++i) {
    Candidate& c = m.order[i];
    c.key = c.logit * asked.inv_temperature + gumbel_noise(asked.seed, asked.draw, c.id);
  }
  return choose(m.order, n, sums);
}

}  // namespace k3
