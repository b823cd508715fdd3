// One MLA layer on this rank's heads, in the order of kimi-k3.md section 5: the absorbed form, over the latent cache.
#include <cmath>

#include "rank/layer.h"

namespace k3 {
namespace {

// q for this rank's heads into work.q, [n_tok, heads * key_len].
void query(StepContext& c, int il, View<float> q) {
  Work& w = c.work;
  const ModelConfig& m = c.model();
  const View<float> cache_row(w.c.data, c.batch.n_tok, m.cache_row());
  const MatmulJob kv{cache_row, w.y, &c.weights.matrix(Role::kMlaKvA, il)};
  if (m.q_latent == 0) {
    const MatmulJob jobs[] = {kv, {q, w.y, &c.weights.matrix(Role::kMlaQ, il)}};
    c.backend.matmul(jobs);
    return;
  }
  const MatmulJob jobs[] = {kv, {w.qa, w.y, &c.weights.matrix(Role::kMlaQA, il)}};
  c.backend.matmul(jobs);
  c.backend.rms_norm(w.qa, w.qa, c.weights.vec(Role::kMlaQANorm, il), m.rms_eps);
  const MatmulJob up{q, w.qa, &c.weights.matrix(Role::kMlaQB, il)};
  c.backend.matmul({&up, 1});
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

  query(c, il, q);
  // Every rank appends the same row, also one without heads: its cache stays whole should it ever be read.
  c.backend.mla_append(w.c, c.weights.vec(Role::kMlaKvANorm, il), m.rms_eps, cache, c.batch);
  if (heads > 0) {
    // The scale uses the per-head key length, not the width of the cached row.
    const float scale = 1.0f / std::sqrt(static_cast<float>(m.key_len));
    c.backend.mla_heads(o, q, c.weights.matrix(Role::kMlaKB, il), c.weights.matrix(Role::kMlaVB, il),
                        m.rope, scale, cache, c.batch, q_abs, ctx);
    c.see("kqv_out", il, o);
    if (c.layer(il).has_attn_gate) {
      const View<float> gate(w.gate.data, n_tok, heads * m.value_len);
      const MatmulJob job{gate, w.y, &c.weights.matrix(Role::kMlaGate, il)};
      c.backend.matmul({&job, 1});
      c.backend.sigmoid_gate(o, gate);
      c.see("mla_gated", il, o);
    }
  }
  const MatmulJob out{w.a, o, &c.weights.matrix(Role::kAttnOutput, il)};
  c.backend.matmul({&out, 1});
  c.see("mla_out", il, w.a);
}

}  // namespace k3
