#include "kernels/cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace k3 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

bool better(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}

CandidateResult not_finite() {
  CandidateResult r;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  r.best = {Candidate{-1, nan, nan}};
  r.max_logit = nan;
  r.sum_exp = r.sum_exp_scaled = nan;
  return r;
}

// Keeps the best n seen so far in a heap whose top is the worst of them.
void offer(std::vector<Candidate>& heap, std::size_t n, const Candidate& c) {
  if (heap.size() < n) {
    heap.push_back(c);
    std::push_heap(heap.begin(), heap.end(), better);
  } else if (n > 0 && better(c, heap.front())) {
    std::pop_heap(heap.begin(), heap.end(), better);
    heap.back() = c;
    std::push_heap(heap.begin(), heap.end(), better);
  }
}

}  // namespace

float gumbel_from_key(std::uint64_t key, std::int32_t id) {
  const std::uint64_t bits = mix_bits(
      key ^ (static_cast<std::uint64_t>(static_cast<std::uint32_t>(id)) * 0x9fb21c651e98df25ULL));
  // u = bits / 2^64 is uniform and -log(-log(1 - u)) is Gumbel. A float has few digits near 1 but
  // many near 0, so the half in which 1 - u is small is taken from the complement; else the large
  // values, the ones that win, would be a coarse grid. | 1 keeps u and 1 - u from being 0.
  // In double, rounded once: so that every device's logarithm gives the same float.
  constexpr double kScale = 0x1p-64;
  const double e = (bits >> 63) != 0 ? -std::log(static_cast<double>(~bits | 1) * kScale)
                                     : -std::log1p(-(static_cast<double>(bits | 1) * kScale));
  return static_cast<float>(-std::log(e));
}

float gumbel_noise(std::uint64_t seed, std::uint64_t draw, std::int32_t id) {
  return gumbel_from_key(draw_key(seed, draw), id);
}

CandidateResult search_candidates(const float* logits, std::int64_t n, std::int64_t vocab_begin,
                                  const CandidateQuery& query) {
  CandidateResult r;
  r.max_logit = -kInf;
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::isnan(logits[i]) || logits[i] == kInf) return not_finite();
    r.max_logit = std::max(r.max_logit, logits[i]);
  }
  const auto limit =
      static_cast<std::size_t>(std::clamp<std::int64_t>(query.n, 0, std::max<std::int64_t>(n, 0)));
  const bool perturbed = query.inv_temperature != 0 && !query.by_logit;
  const std::uint64_t key = draw_key(query.seed, query.draw);
  r.best.reserve(limit);
  for (std::int64_t i = 0; i < n; ++i) {
    Candidate c;
    c.id = static_cast<std::int32_t>(vocab_begin + i);
    c.logit = logits[i];
    c.key = perturbed ? logits[i] * query.inv_temperature + gumbel_from_key(key, c.id) : logits[i];
    offer(r.best, limit, c);
    if (logits[i] == -kInf) continue;  // and (-inf) - (-inf) never arises
    const double below = static_cast<double>(logits[i]) - r.max_logit;
    r.sum_exp += std::exp(below);
    if (query.inv_temperature != 0) r.sum_exp_scaled += std::exp(below * query.inv_temperature);
  }
  if (query.inv_temperature == 0) r.sum_exp_scaled = r.sum_exp;
  std::sort(r.best.begin(), r.best.end(), better);
  return r;
}

void penalise_logits(float* logits, std::int64_t n, std::int64_t vocab_begin,
                     const std::int32_t* history, std::int64_t n_hist, float repetition,
                     float presence) {
  std::vector<std::int32_t> ids;  // those of this band, each once
  for (std::int64_t i = 0; i < n_hist; ++i) {
    const std::int64_t at = history[i] - vocab_begin;
    if (history[i] >= 0 && at >= 0 && at < n) ids.push_back(history[i]);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const std::int32_t id : ids) {
    float& logit = logits[id - vocab_begin];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= presence;
  }
}

}  // namespace k3
