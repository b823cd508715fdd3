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

}  // namespace

void mla_phase(StepContext& c, int il) {
  attention_input(c, il);
  Work& w = c.work;
  const ModelConfig& m = c.model();
  const std::int64_t n_tok = c.batch.n_tok, heads = c.plan.heads(c.rank, il).size();
  const View<float> q(w.q.data, n_tok, heads * m.key_len),
      q_abs(w.q_abs.data, n_tok, heads * m.cache_row());
  const View<float> ctx(w.ctx.data, n_tok, heads * m.kv_latent),
      o(w.o.data, n_tok, heads * m.value_len);
  const MlaCache& cache = c.state.mla(il);

  const View<float> gate(w.gate.data, n_tok, c.layer(il).has_attn_gate ? o.cols : 0);
  query(c, il, q, gate);
  // Every rank appends the same row, also one without heads: its cache stays whole should it ever be read.
  c.backend.mla_append(w.c, c.weights.vec(Role::kMlaKvANorm, il), m.rms_eps, cache, c.batch);
  if (heads > 0) {
    // The scale uses the per-head key length, not the width of the cached row.
    const float scale = 1.0f / std::sqrt(static_cast<float>(m.key_len));
    c.backend.mla_heads(o, q, c.weights.matrix(Role::kMlaKB, il),
                        c.weights.matrix(Role::kMlaVB, il), m.rope, scale, cache, c.batch, q_abs,
                        ctx);
    c.see("kqv_out", il, o);
  }
  output(c, il, o, gate);
  c.see("mla_out", il, w.a);
}

}  // namespace k3
