// One latent MoE block on this rank's experts, in the order of kimi-k3.md section 6. Three phases: what every rank needs to
// know of the token (router logits, latent), the experts' partial sum in the latent, and the way back to the stream.
#include "rank/layer.h"

namespace k3 {
namespace {

bool is_gathered(const StepContext& c) {
  return c.plan.layout().tp > 1 && c.plan.layout().policy == ShardPolicy::kFull;
}

// The bands of all ranks of this rank's stage lie rank after rank in work.gathered: put each tensor together.
void unpack_gathered(StepContext& c, int il) {
  const Layout& layout = c.plan.layout();
  std::vector<std::int64_t> router, latent;
  const int first = layout.stage(c.rank) * layout.tp;
  for (int r = first; r < first + layout.tp; ++r) {
    router.push_back(c.plan.router_rows(r, il).size());
    latent.push_back(c.plan.latent_rows(r, il).size());
  }
  c.backend.unpack_bands(c.work.router, c.work.z, c.work.gathered, router, latent);
}

// The way back from the latent and the shared experts' way down, in one go where the backend can.
bool join_fused(StepContext& c, int il, View<const float> hidden) {
  const ModelConfig& m = c.model();
  const Band columns = c.plan.latent_columns(c.rank, il);
  Operand operands[2];
  operands[0].x = c.work.m.columns(columns.begin, columns.size());
  if (c.layer(il).has_routed_norm) {
    operands[0].op = Operand::Op::kRms;
    operands[0].x = c.work.m;
    operands[0].norm_w = c.weights.vec(Role::kRoutedNorm, il);
    operands[0].eps = m.rms_eps;
    operands[0].begin = columns.begin;
    operands[0].n = columns.size();
  }
  operands[1].x = hidden;
  const bool shared = !hidden.empty();
  FusedProduct product;
  product.y = c.work.a;
  product.a = {&c.weights.matrix(Role::kRoutedUp, il), 0};
  if (shared) {
    product.join = FusedProduct::Join::kAdd;
    product.b = {&c.weights.matrix(Role::kSharedDown, il), 1};
  }
  return c.fused({operands, shared ? 2u : 1u}, {&product, 1});
}

}  // namespace

void moe_route_phase(StepContext& c, int il) {
  ffn_input(c, il);
  Work& w = c.work;
  const std::int64_t n_router = c.plan.router_rows(c.rank, il).size(),
                     n_latent = c.plan.latent_rows(c.rank, il).size();
  const View<float> band(w.packed.data, c.batch.n_tok, n_router + n_latent);
  // The router and the shared experts read the full-width input, not the latent.
  const MatmulJob jobs[] = {
      {is_gathered(c) ? band.columns(0, n_router) : w.router, w.y,
       &c.weights.matrix(Role::kRouter, il)},
      {is_gathered(c) ? band.columns(n_router, n_latent) : w.z, w.y,
       &c.weights.matrix(Role::kRoutedDown, il)},
  };
  if (c.layer(il).ffn_shared == 0) return c.backend.matmul(jobs);
  gated_hidden(c, il, Role::kSharedGate, Role::kSharedUp, jobs);
}

void moe_experts_phase(StepContext& c, int il) {
  Work& w = c.work;
  const ModelConfig& m = c.model();
  if (is_gathered(c)) unpack_gathered(c, il);
  c.see("ffn_moe_logits", il, w.router);
  ExpertStep step;
  step.m = w.m;
  step.z = w.z;
  step.logits = w.router;
  step.ids = w.expert_ids;
  step.weights = w.expert_weights;
  step.bias = c.weights.vec(Role::kRouterBias, il);
  step.normalise = m.expert_norm;
  step.scale = m.expert_scale;
  step.w = {&c.weights.matrix(Role::kExpertGate, il), &c.weights.matrix(Role::kExpertUp, il),
            &c.weights.matrix(Role::kExpertDown, il), c.plan.experts(c.rank, il).begin};
  step.situ = m.situ;
  if (c.choices != nullptr) c.choices->apply(step, il);
  if (c.probe == nullptr && c.backend.fused_experts(step)) return;
  c.backend.route(step.ids, step.weights, step.logits, step.bias, step.bias_stride, step.normalise,
                  step.scale);
  if (c.probe != nullptr) c.probe->see_ids("ffn_moe_topk", il, step.ids);
  c.see("ffn_moe_weights", il, step.weights);
  c.backend.experts(step.m, step.z, step.ids, step.weights, step.w, step.situ);
}

void moe_join_phase(StepContext& c, int il) {
  Work& w = c.work;
  const LayerConfig& layer = c.layer(il);
  c.see("ffn_moe_out", il, w.m);
  const View<float> hidden =
      layer.ffn_shared == 0
          ? View<float>()
          : View<float>(w.ffn_g.data, c.batch.n_tok, c.weights.matrix(Role::kSharedGate, il).n_out);
  if (join_fused(c, il, hidden)) return;
  // The norm is not linear: w.m is the complete sum over all experts and ranks by now.
  if (layer.has_routed_norm)
    c.backend.rms_norm(w.m, w.m, c.weights.vec(Role::kRoutedNorm, il), c.model().rms_eps);
  const Band columns = c.plan.latent_columns(c.rank, il);
  const MatmulJob up{w.a, w.m.columns(columns.begin, columns.size()),
                     &c.weights.matrix(Role::kRoutedUp, il)};
  if (layer.ffn_shared == 0) return c.backend.matmul({&up, 1});
  const MatmulJob jobs[] = {up, {w.tmp, hidden, &c.weights.matrix(Role::kSharedDown, il)}};
  c.backend.matmul(jobs);
  c.see("ffn_shexp", il, w.tmp);
  c.backend.residual(w.a, w.tmp, false);
}

}  // namespace k3
