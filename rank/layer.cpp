#include "rank/layer.h"

namespace k3 {
namespace {

View<float> bank_entry(StepContext& c, std::int64_t i) {
  return {c.work.bank + i * c.work.bank_stride, c.batch.n_tok, c.model().hidden};
}

void mixed_input(StepContext& c, int il, std::int64_t n_bank, Role score, Role norm,
                 std::string_view trace) {
  // blk.0.attn_res_score is in the file but never used: the bank is still empty.
  const float* score_w = n_bank > 0 ? c.weights.vec(score, il) : nullptr;
  float* probs = c.probe != nullptr && n_bank > 0 ? c.work.probs.data : nullptr;
  c.backend.mix_norm(c.work.y, c.work.x, c.work.bank, n_bank, c.work.bank_stride, score_w,
                     c.weights.vec(norm, il), c.model().rms_eps, probs);
  if (probs != nullptr) c.see(trace, il, View<const float>(probs, c.batch.n_tok, n_bank + 1));
}

}  // namespace

void embed_phase(StepContext& c, int) {
  c.backend.embed(c.work.x, c.batch, c.weights.matrix(Role::kTokenEmbd),
                  c.plan.vocab_in(c.rank).begin);
}

void attention_input(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  if (il == 0) c.see("inp_embd", -1, c.work.x);
  mixed_input(c, il, m.bank_before(il), Role::kAttnResScore, Role::kAttnNorm, "res_probs_attn");
  // The raw stream is banked, not the mixed one.
  if (il % m.bank_block == 0) c.backend.copy_rows(bank_entry(c, il / m.bank_block), c.work.x);
  c.see("attn_norm", il, c.work.y);
}

void ffn_input(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  // At a banked layer the stream restarts from the attention output alone.
  c.backend.residual(c.work.x, c.work.a, il % m.bank_block == 0);
  c.see("prefix_sum_attn", il, c.work.x);
  mixed_input(c, il, m.bank_size(il), Role::kFfnResScore, Role::kFfnNorm, "res_probs_ffn");
  c.see("ffn_norm", il, c.work.y);
}

void gated_ffn(StepContext& c, int il, View<float> out, Role gate, Role up, Role down) {
  const Weight& w_gate = c.weights.matrix(gate, il);
  const View<float> g(c.work.ffn_g.data, c.batch.n_tok, w_gate.n_out);
  const View<float> u(c.work.ffn_u.data, c.batch.n_tok, w_gate.n_out);
  const MatmulJob in[] = {{g, c.work.y, &w_gate}, {u, c.work.y, &c.weights.matrix(up, il)}};
  c.backend.matmul(in);
  c.backend.situ(g, u, c.model().situ);
  const MatmulJob job{out, g, &c.weights.matrix(down, il)};
  c.backend.matmul({&job, 1});
}

void dense_phase(StepContext& c, int il) {
  ffn_input(c, il);
  gated_ffn(c, il, c.work.a, Role::kDenseGate, Role::kDenseUp, Role::kDenseDown);
}

void close_layer_phase(StepContext& c, int il) {
  c.see("ffn_out", il, c.work.a);
  c.backend.residual(c.work.x, c.work.a, false);
  c.backend.note_nonfinite(c.work.x, il, c.first_nonfinite);
  c.see("l_out", il, c.work.x);
}

std::vector<Phase> layer_program(const Plan& plan, int rank) {
  const bool cut = plan.layout().tp > 1;
  const bool full = cut && plan.layout().policy == ShardPolicy::kFull;
  // A value that every rank holds whole must not be summed: it would come out tp times too large.
  const auto when = [](bool speaks, Point p) { return speaks ? p : Point::kCount; };
  std::vector<Phase> program;
  if (plan.has_embedding(rank))
    program.push_back({"embed", -1, embed_phase, when(full, Point::kEmbed)});
  const Band layers = plan.layers(rank);
  for (auto il = static_cast<int>(layers.begin); il < layers.end; ++il) {
    const LayerConfig& l = plan.config().layers[static_cast<std::size_t>(il)];
    program.push_back({l.is_mla ? "mla" : "kda", il, l.is_mla ? mla_phase : kda_phase,
                       when(full, Point::kAttnOut)});
    if (l.is_dense) {
      program.push_back({"dense", il, dense_phase, when(full, Point::kFfnOut)});
    } else {
      program.push_back({"moe route", il, moe_route_phase, when(full, Point::kRouterLatent)});
      program.push_back({"moe experts", il, moe_experts_phase, when(cut, Point::kMoeLatent)});
      program.push_back({"moe join", il, moe_join_phase, when(full, Point::kFfnOut)});
    }
    program.push_back({"close", il, close_layer_phase});
  }
  return program;
}

}  // namespace k3
