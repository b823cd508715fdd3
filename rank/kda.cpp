// One KDA layer on this rank's heads, in the order of kimi-k3.md section 4.
#include "rank/layer.h"

namespace k3 {

void kda_phase(StepContext& c, int il) {
  attention_input(c, il);
  Work& w = c.work;
  const ModelConfig& m = c.model();
  const std::int64_t n_tok = c.batch.n_tok, heads = c.plan.heads(c.rank, il).size(),
                     d = heads * m.kda_head_dim;
  const View<float> u(w.u.data, n_tok, 3 * d), qkv(w.qkv.data, n_tok, 3 * d);
  const View<float> g(w.g.data, n_tok, d), gate(w.gate.data, n_tok, d), o(w.o.data, n_tok, d);
  const View<float> beta(w.beta.data, n_tok, heads);

  const MatmulJob in[] = {
      {u.columns(0, d), w.y, &c.weights.matrix(Role::kKdaQ, il)},
      {u.columns(d, d), w.y, &c.weights.matrix(Role::kKdaK, il)},
      {u.columns(2 * d, d), w.y, &c.weights.matrix(Role::kKdaV, il)},
      {gate, w.y, &c.weights.matrix(Role::kKdaG, il)},
      {w.f, w.y, &c.weights.matrix(Role::kKdaFA, il)},
      {beta, w.y, &c.weights.matrix(Role::kKdaBeta, il)},
  };
  c.backend.matmul(in);
  const MatmulJob decay{g, w.f, &c.weights.matrix(Role::kKdaFB, il)};
  c.backend.matmul({&decay, 1});

  const View<float> q = qkv.columns(0, d), k = qkv.columns(d, d), v = qkv.columns(2 * d, d);
  if (d > 0) {
    const KdaState& state = c.state.kda(il);
    c.backend.kda_conv(qkv, u, c.weights.conv(il), state, c.batch);
    c.see("kda_q_conv", il, q);
    c.see("kda_k_conv", il, k);
    c.see("kda_v_conv", il, v);
    c.backend.l2_norm_heads(q, m.kda_head_dim, m.rms_eps);
    c.backend.l2_norm_heads(k, m.kda_head_dim, m.rms_eps);
    c.backend.kda_gates(g, beta, c.weights.vec(Role::kKdaDt, il), c.weights.vec(Role::kKdaA, il),
                        m.kda_head_dim, m.gate_lower_bound.has_value(),
                        m.gate_lower_bound.value_or(0.0f));
    c.see("kda_g1", il, g);
    c.see("kda_beta", il, beta);
    c.backend.kda_scan(o, q, k, v, g, beta, state, c.batch);
    c.see("kda_scan_out", il, o);
    c.see("kda_g2", il, gate);
    c.backend.kda_output_gate(o, gate, c.weights.vec(Role::kKdaNorm, il), m.kda_head_dim,
                              m.rms_eps);
  }
  const MatmulJob out{w.a, o, &c.weights.matrix(Role::kAttnOutput, il)};
  c.backend.matmul({&out, 1});
  c.see("kda_out", il, w.a);
}

}  // namespace k3
