// One MLA layer on this rank's heads, in the order of kimi-k3.md section 5: over the latent cache.
#include <cmath>
#include <vector>

#include "rank/layer.h"

namespace k3 {
namespace {

// q for this rank's heads into `q`, [n_tok, heads * key_len], the raw cache row into work.c, and the gate's product where
// the layer has one.
void query(StepContext& c, int il, View<float> q, View<float> gate) {
  Work& w = c.work;
  const ModelConfig& m = c.model();
  const View<float> cache_row(w.c.data, c.batch.n_tok, m.cache_row());
  std::vector<MatmulJob> jobs{{cache_row, w.y, &c.weights.matrix(Role::kMlaKvA, il)}};
  if (!gate.empty()) jobs.push_back({gate, w.y, &c.weights.matrix(Role::kMlaGate, il)});
  if (m.q_latent == 0) {
    jobs.push_back({q, w.y, &c.weights.matrix(Role::kMlaQ, il)});
    return c.backend.matmul(jobs);
  }
  jobs.push_back({w.qa, w.y, &c.weights.matrix(Role::kMlaQA, il)});
  c.backend.matmul(jobs);
  Operand normed;
  normed.op = Operand::Op::kRms;
  normed.x = w.qa;
  normed.norm_w = c.weights.vec(Role::kMlaQANorm, il);
  normed.eps = m.rms_eps;
  normed.n = w.qa.cols;
  const FusedProduct up{q, FusedProduct::Join::kOne, {&c.weights.matrix(Role::kMlaQB, il), 0}, {}};
  if (c.fused({&normed, 1}, {&up, 1})) return;
  c.backend.rms_norm(w.qa, w.qa, normed.norm_w, m.rms_eps);
  const MatmulJob job{q, w.qa, &c.weights.matrix(Role::kMlaQB, il)};
  c.backend.matmul({&job, 1});
}

// work.a = output . (o * sigmoid(gate)), a partial sum over ranks.
void output(StepContext& c, int il, View<float> o, View<float> gate) {
  const Weight& weight = c.weights.matrix(Role::kAttnOutput, il);
  if (!gate.empty()) {
    Operand gated;
    gated.op = Operand::Op::kSigmoidGate;
    gated.x = o;
    gated.other = gate;
    const FusedProduct out{c.work.a, FusedProduct::Join::kOne, {&weight, 0}, {}};
    if (c.fused({&gated, 1}, {&out, 1})) return;
    c.backend.sigmoid_gate(o, gate);
    c.see("mla_gated", il, o);
  }
  const MatmulJob out{c.work.a, o, &weight};
  c.backend.matmul({&out, 1});
}

// The views of one layer, this rank's heads.
struct Heads {
  Heads(StepContext& c, int il)
      : n(c.plan.heads(c.rank, il).size()),
        q(c.work.q.data, c.batch.n_tok, n * c.model().key_len),
        q_abs(c.work.q_abs.data, c.batch.n_tok, n * c.model().cache_row()),
        ctx(c.work.ctx.data, c.batch.n_tok, n * c.model().kv_latent),
        o(c.work.o.data, c.batch.n_tok, n * c.model().value_len),
        gate(c.work.gate.data, c.batch.n_tok, c.layer(il).has_attn_gate ? o.cols : 0) {}

  std::int64_t n;
  View<float> q, q_abs, ctx, o, gate;
};

// Queries, and the tokens' rows in the cache. Every rank appends the same row, also one without heads: its cache stays whole
// (or its share of it) should it ever be read.
void begin(StepContext& c, int il, const Heads& h) {
  attention_input(c, il);
  query(c, il, h.q, h.gate);
  c.backend.mla_append(c.work.c, c.weights.vec(Role::kMlaKvANorm, il), c.model().rms_eps,
                       c.state.mla(il), c.batch);
}

void end(StepContext& c, int il, const Heads& h) {
  if (h.n > 0) c.see("kqv_out", il, h.o);
  output(c, il, h.o, h.gate);
  c.see("mla_out", il, c.work.a);
}

// The scale uses the per-head key length, not the width of the cached row.
float scale_of(const ModelConfig& m) { return 1.0f / std::sqrt(static_cast<float>(m.key_len)); }

}  // namespace

void mla_phase(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  const Heads h(c, il);
  begin(c, il, h);
  if (h.n > 0) {
    c.backend.mla_heads(h.o, h.q, c.weights.matrix(Role::kMlaKB, il),
                        c.weights.matrix(Role::kMlaVB, il), m.rope, scale_of(m), c.state.mla(il),
                        c.batch, h.q_abs, h.ctx);
  }
  end(c, il, h);
}

void mla_query_phase(StepContext& c, int il) {
  const Heads h(c, il);
  begin(c, il, h);
  if (h.n > 0)
    c.backend.mla_absorb(h.q_abs, h.q, c.weights.matrix(Role::kMlaKB, il), c.model().rope);
}

void mla_rows_phase(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  c.backend.mla_attend_part(c.work.part, c.work.q_all, m.n_head, scale_of(m), c.state.mla(il),
                            c.batch);
}

void mla_join_phase(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  const Heads h(c, il);
  if (h.n > 0) {
    const std::int64_t n_part = c.plan.layout().tp, one = 2 + m.kv_latent;
    const View<const float> parts(c.work.parts.data, n_part * c.batch.n_tok, m.n_head * one);
    c.backend.mla_combine(h.ctx, parts.columns(c.plan.heads(c.rank, il).begin * one, h.n * one),
                          n_part, h.n);
    const Weight& v_b = c.weights.matrix(Role::kMlaVB, il);
    c.backend.head_matmul(h.o, v_b.n_out, h.ctx, v_b.n_in, v_b);
  }
  end(c, il, h);
}

}  // namespace k3
