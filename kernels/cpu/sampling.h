// Sampling on host memory: the definition of penalise, candidates and the noise, for the CPU
// backend and for tests.
#pragma once

#include <cstdint>

#include "kernels/backend.h"

namespace k3 {

// 64 bits that mix seed, draw and id; each is a full bijective mix of the one before, so no two ids
// of a draw collide. Integer operations only: the same on every device.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The part of the noise that all ids of a draw share.
constexpr std::uint64_t draw_key(std::uint64_t seed, std::uint64_t draw) {
  return mix_bits(mix_bits(seed + 0x9e3779b97f4a7c15ULL) ^ (draw * 0xd1342543de82ef95ULL + 1));
}

// gumbel_noise(seed, draw, id) with key = draw_key(seed, draw).
float gumbel_from_key(std::uint64_t key, std::int32_t id);

// Searches logits[0 .. n), the band that starts at vocab_begin; see CandidateQuery. Sums are in
// double, in order of id. A NaN or +infinity anywhere in the band: best is one candidate of id -1
// and the sums are NaN. -infinity is a token of no probability. n <= 0: no candidates, max_logit
// -infinity, sums 0.
CandidateResult search_candidates(const float* logits, std::int64_t n, std::int64_t vocab_begin,
                                  const CandidateQuery& query);

// Backend::penalise for one row, in place. Ids outside the band, negative ones included, are passed
// over.
void penalise_logits(float* logits, std::int64_t n, std::int64_t vocab_begin,
                     const std::int32_t* history, std::int64_t n_hist, float repetition,
                     float presence);

}  // namespace k3
