// The layer program: the model's description as a list of phases, each ending where ranks must speak. One program for every
// backend and every layout; forward.cpp drives it and does the speaking.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/points.h"
#include "kernels/backend.h"
#include "rank/expert_choices.h"
#include "rank/plan.h"
#include "rank/state.h"
#include "rank/weights.h"

namespace k3 {

// Sees intermediates by the names of the golden traces ("ffn_moe_out", layer 4; tests/golden/trace_test.cpp). Banded ones hold
// this rank's part.
class Probe {
 public:
  virtual ~Probe() = default;
  virtual void see(std::string_view name, int layer, View<const float> values) = 0;
  virtual void see_ids(std::string_view name, int layer, View<const std::int32_t> values) = 0;
};

// Activations for up to max_tok tokens, allocated once; each step uses the first n_tok rows, packed.
// Widths are this rank's; a band may be empty.
class Work {
 public:
  Work(Backend& backend, const Plan& plan, int rank, std::int64_t max_tok,
       std::int64_t max_logit_rows);
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  // Device bytes of such a Work, before anything is allocated.
  static std::uint64_t bytes(const Plan& plan, int rank, std::int64_t max_tok,
                             std::int64_t max_logit_rows);

  // Lays the buffers out for a step of n_tok tokens. x and the bank lie one after the other, so that a stage hands both on
  // in one message: [x | bank 0 | bank 1 ...], each [n_tok, hidden].
  void shape(std::int64_t n_tok);

  std::uint64_t device_bytes() const { return storage_->bytes(); }
  std::int64_t max_tok() const { return max_tok_; }

  View<float> x;          // [n_tok, hidden] the residual stream
  float* bank = nullptr;  // [n_bank][n_tok, hidden]
  std::int64_t bank_stride = 0;
  View<float> y, a, tmp;             // [n_tok, hidden] normed input, block output, scratch
  View<float> u, qkv;                // [n_tok, 3 * heads * kda_head_dim]
  View<float> g, o, gate;            // [n_tok, heads * head width], KDA and MLA
  View<float> f, beta;               // [n_tok, kda_head_dim], [n_tok, heads]
  View<float> qa, q, c, q_abs, ctx;  // MLA
  View<float> q_all, part;       // MLA over cut rows: all heads' queries, what this rank's rows say
  View<float> parts;             // of every rank, one after the other: [ranks][n_tok, as part]
  View<float> packed, gathered;  // router and latent bands; all ranks' of them
  View<float> router, z, m;      // [n_tok, experts], [n_tok, moe_latent] twice
  View<std::int32_t> expert_ids;  // [n_tok, experts used]
  View<float> expert_weights;
  View<float> ffn_g, ffn_u;  // [n_tok, widest ffn band]; narrowed per layer
  View<float> head_in;       // [max_logit_rows, hidden]
  View<float> logits;        // [max_logit_rows, vocabulary band]
  View<float> probs;         // [n_tok, bank + 1], traces only

 private:
  explicit Work(std::int64_t max_tok) : max_tok_(max_tok) {}
  // Lays all buffers out from `base` (null: only measures) and returns their size.
  std::uint64_t carve(std::byte* base, const Plan& plan, int rank, std::int64_t max_logit_rows);

  std::int64_t max_tok_ = 0;
  std::unique_ptr<DeviceBuffer> storage_;
  std::vector<View<float>*> by_tok_;  // views whose row count follows n_tok
};

// Everything a phase may touch.
struct StepContext {
  Backend& backend;
  const Plan& plan;
  int rank;  // of the world
  const Weights& weights;
  State& state;
  Work& work;
  BatchView batch;
  std::int32_t* first_nonfinite =
      nullptr;  // device, [n_tok]; lowest layer whose output was not finite
  Probe* probe = nullptr;
  const ChoiceTap* choices = nullptr;

  const ModelConfig& model() const { return plan.config(); }
  const LayerConfig& layer(int il) const { return model().layers[static_cast<std::size_t>(il)]; }
  // Several products in one go; a trace wants every intermediate, so it gets none of these.
  bool fused(std::span<const Operand> operands, std::span<const FusedProduct> products) const {
    return probe == nullptr && backend.fused_products(operands, products);
  }
  void see(std::string_view name, int il, View<const float> v) const {
    if (probe != nullptr) probe->see(name, il, v);
  }
};

// A stretch of arithmetic on one rank, and the Point at which ranks speak after it (kCount: they do not).
struct Phase {
  const char* name;
  int layer;
  void (*run)(StepContext&, int layer);
  Point point = Point::kCount;
};

// This rank's phases of one forward step, from its stage's first layer (or the embedding) to its last (not the head).
std::vector<Phase> layer_program(const Plan& plan, int rank);

// Phases by block kind; each reads and writes StepContext::work as its body says.
void embed_phase(StepContext& c, int);
void kda_phase(StepContext& c, int il);
void mla_phase(StepContext& c, int il);
// The same in three, where each rank keeps some of the rows.
void mla_query_phase(StepContext& c, int il);
void mla_rows_phase(StepContext& c, int il);
void mla_join_phase(StepContext& c, int il);
void dense_phase(StepContext& c, int il);
void moe_route_phase(StepContext& c, int il);
void moe_experts_phase(StepContext& c, int il);
void moe_join_phase(StepContext& c, int il);
void close_layer_phase(StepContext& c, int il);

// Shared by the block kinds: the stream with the block before it added, mixed and normed, into work.y. A layer's ffn output
// stays in work.a until the next layer's attention_input() adds it, or close_layer_phase() at the end of a stage.
void attention_input(StepContext& c, int il);
void ffn_input(StepContext& c, int il);
// situ(gate . y, up . y) over this rank's band of the ffn, y = work.y, into the view returned (work.ffn_g). `beside`: other
// products of y, taken in the same go.
View<float> gated_hidden(StepContext& c, int il, Role gate, Role up,
                         std::span<const MatmulJob> beside = {});

}  // namespace k3
