// Logits to the next token, on rank 0, from candidates: logits stay banded by vocabulary over the
// ranks; each rank answers a CandidateQuery over its band, and only the candidates and the band's
// sums of exponentials travel.
//
// The draw is Gumbel-max: of the kept tokens, the one of largest logit/T + gumbel_noise(seed, draw,
// id). The noise depends on nothing else, so the same seed gives the same draws whatever the
// layout, chunking or number of queries.
//
// What is kept, of all tokens in order of their logit (ties: lower id first), probabilities at
// temperature T:
//   1. top_k: the first k;
//   2. top_p: the shortest beginning whose probabilities, renormalised over the first k, reach
//      top_p;
//   3. min_p: those with at least min_p times the probability of the first.
// Each cuts the end off an ordered list and the first token is always kept, so only the order of 1
// and 2 matters. The temperature comes first here; engines that filter at temperature 1 keep other
// sets when T is not 1.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace k3 {

struct SamplerOptions {
  float temp = 1.0f;       // 0: greedy, the highest logit (ties: lower id), else 0.001 to 100
  std::int32_t top_k = 0;  // 0: off
  float top_p = 0.95f;     // over 0 to 1; 1: off
  float min_p = 0.0f;      // 0 to 1; 0: off
  float repetition_penalty = 1.0f;  // over 0 to 100; 1: off
  float presence_penalty = 0.0f;    // -100 to 100; 0: off
  std::uint64_t seed = 0;

  bool penalises() const { return repetition_penalty != 1.0f || presence_penalty != 0.0f; }
};

// Throws std::invalid_argument naming the option as the command line spells it, its value and its
// range.
void validate(const SamplerOptions& options);

struct Decision {
  enum class Kind {
    kToken,     // drawn: the fields below hold
    kNeedMore,  // the kept set cannot be known from these candidates: ask all ranks `next`
    kNotFinite,  // a logit is NaN or +infinity, or all are -infinity, or what they came from was not finite
  };
  Kind kind = Kind::kToken;
  std::int32_t id = -1;
  float logit = 0;  // after penalties
  // By how much the choice beat the runner-up, in what was compared: the logit when greedy, else
  // logit/T + noise. Infinite where only one token was kept.
  float margin = 0;
  double logprob = 0;  // logit - lse: at temperature 1, over the whole vocabulary, after penalties
  double lse = 0;      // log of the sum of exp(logit) over the whole vocabulary
  CandidateQuery next;
  std::int32_t layer =
      -1;  // kNotFinite: the first whose output was not finite (n_layer: the logits), -1: not known
};

// What to ask every rank first for draw number `draw` of a sequence. `options` must be valid.
CandidateQuery first_query(const SamplerOptions& options, std::uint64_t draw);

// Decides from the answers of all ranks to `asked`, in any order. A rank whose band is empty
// answers with nothing. Ends after a few rounds: `next` asks for 4 times as many, and a rank with
// no more than it sent has sent all it has. Throws std::invalid_argument when the answers hold no
// token at all.
Decision decide(const SamplerOptions& options, const CandidateQuery& asked,
                std::span<const CandidateResult> results);

}  // namespace k3
