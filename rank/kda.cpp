// One KDA layer on this rank's heads, in the order of kimi-k3.md section 4.
#include "rank/layer.h"

namespace k3 {
namespace {

// Views of this rank's heads: d = heads * head_dim columns each, 3 d in u and qkv.
struct KdaViews {
  View<float> u, qkv, g, gate, o, beta;
};

bool kda_fused(StepContext& c, int il, const KdaViews& views) {
  const ModelConfig& m = c.model();
  KdaStep step;
  step.o = views.o;
  step.u = views.u;
  step.f = c.work.f;
  step.gate = views.gate;
  step.beta = views.beta;
  step.f_b = &c.weights.matrix(Role::kKdaFB, il);
  step.conv = c.weights.conv(il);
  step.dt = c.weights.vec(Role::kKdaDt, il);
  step.a = c.weights.vec(Role::kKdaA, il);
  step.norm_w = c.weights.vec(Role::kKdaNorm, il);
  step.eps = m.rms_eps;
  step.safe_gate = m.gate_lower_bound.has_value();
  step.lower_bound = m.gate_lower_bound.value_or(0.0f);
  return c.probe == nullptr && c.backend.fused_kda(step, c.state.kda(il), c.batch);
}

void kda_unfused(StepContext& c, int il, const KdaViews& views) {
  const auto& [u, qkv, g, gate, o, beta] = views;
  const ModelConfig& m = c.model();
  const std::int64_t d = o.cols;
  const MatmulJob decay{g, c.work.f, &c.weights.matrix(Role::kKdaFB, il)};
  c.backend.matmul({&decay, 1});
  const View<float> q = qkv.columns(0, d), k = qkv.columns(d, d), v = qkv.columns(2 * d, d);
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
  c.backend.kda_output_gate(o, gate, c.weights.vec(Role::kKdaNorm, il), m.kda_head_dim, m.rms_eps);
}

}  // namespace

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
  const KdaViews views{u, qkv, g, gate, o, beta};
  if (d > 0 && !kda_fused(c, il, views)) kda_unfused(c, il, views);
  const MatmulJob out{w.a, o, &c.weights.matrix(Role::kAttnOutput, il)};
  c.backend.matmul({&out, 1});
  c.see("kda_out", il, w.a);
}

}  // namespace k3
