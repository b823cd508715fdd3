// Every place where ranks speak to each other has a name. A Point says what travels; which ranks
// take part is the Comm's business. Counts and times are kept per Point, and a rank that waits too
// long names its Point.
#pragma once

#include <cstdint>

namespace k3 {

enum class Point : std::uint8_t {
  kAgree,       // does every rank still stand? (errors travel here)
  kRunConfig,   // rank 0's options to all
  kModelCheck,  // did all ranks open the same model?
  kStep,        // rank 0 tells all what the next step is: a prompt's chunk, or the sampled token
  kEmbed,       // sum of vocabulary bands of the embedding            [n_tok, hidden]
  kMlaQuery,  // gather of the heads' queries, where cache rows are cut  [n_tok, heads * cache row]
  kMlaParts,  // gather of what each rank's rows say of all heads  [ranks][n_tok, heads * (2 + kv_latent)]
  kAttnOut,       // sum of the partial attention outputs                [n_tok, hidden]
  kRouterLatent,  // gather of router logits and latent rows   [n_tok, experts + moe_latent]
  kMoeLatent,     // sum of the experts' partial outputs, in the latent  [n_tok, moe_latent]
  kFfnOut,        // sum of shared experts + routed_up, or dense ffn     [n_tok, hidden]
  kStageHandOff,  // x and the bank, from one pipeline stage to the next
  kLogits,        // whole logit rows to rank 0 (evaluation only)
  kCandidates,    // best tokens of each vocabulary band and log-sum-exp, to rank 0
  kResidency,     // per-rank numbers for the log
  kSession,  // a stored sequence's name and head to all, and what each rank wrote of it to rank 0
  kCount,
};

const char* point_name(Point point);

}  // namespace k3
