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

}  // namespace

void moe_route_phase(StepContext& c, int il) {
  ffn_input(c, il);
  Work& w = c.work;
  const std::int64_t n_router = c.plan.router_rows(c.rank, il).size(),
                     n_latent = c.plan.latent_rows(c.rank, il).size();
  const View<float> band(w.packed.data, c.batch.n_tok, n_router + n_latent);
  // The router reads the full-width input, not the latent.
  const MatmulJob jobs[] = {
      {is_gathered(c) ? band.columns(0, n_router) : w.router, w.y,
       &c.weights.matrix(Role::kRouter, il)},
      {is_gathered(c) ? band.columns(n_router, n_latent) : w.z, w.y,
       &c.weights.matrix(Role::kRoutedDown, il)},
  };
  c.backend.matmul(jobs);
}

void moe_experts_phase(StepContext& c, int il) {
  Work& w = c.work;
  const ModelConfig& m = c.model();
  if (is_gathered(c)) unpack_gathered(c, il);
  c.see("ffn_moe_logits", il, w.router);
  c.backend.route(w.expert_ids, w.expert_weights, w.router, c.weights.vec(Role::kRouterBias, il),
                  m.expert_norm, m.expert_scale);
  if (c.probe != nullptr) c.probe->see_ids("ffn_moe_topk", il, w.expert_ids);
  c.see("ffn_moe_weights", il, w.expert_weights);
  const ExpertWeights experts{
      &c.weights.matrix(Role::kExpertGate, il), &c.weights.matrix(Role::kExpertUp, il),
      &c.weights.matrix(Role::kExpertDown, il), c.plan.experts(c.rank, il).begin};
  c.backend.experts(w.m, w.z, w.expert_ids, w.expert_weights, experts, m.situ);
}

void moe_join_phase(StepContext& c, int il) {
  Work& w = c.work;
  const LayerConfig& layer = c.layer(il);
  c.see("ffn_moe_out", il, w.m);
  // The norm is not linear: w.m is the complete sum over all experts and ranks by now.
  if (layer.has_routed_norm)
    c.backend.rms_norm(w.m, w.m, c.weights.vec(Role::kRoutedNorm, il), c.model().rms_eps);
  const Band columns = c.plan.latent_columns(c.rank, il);
  const MatmulJob up{w.a, w.m.columns(columns.begin, columns.size()),
                     &c.weights.matrix(Role::kRoutedUp, il)};
  c.backend.matmul({&up, 1});
  if (layer.ffn_shared == 0) return;
  // Shared experts read the full-width input, not the latent.
  gated_ffn(c, il, w.tmp, Role::kSharedGate, Role::kSharedUp, Role::kSharedDown);
  c.see("ffn_shexp", il, w.tmp);
  c.backend.residual(w.a, w.tmp, false);
}

}  // namespace k3
