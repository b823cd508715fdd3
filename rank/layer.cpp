#include "rank/layer.h"

namespace k3 {
namespace {

View<float> bank_entry(StepContext& c, std::int64_t i) {
  return {c.work.bank + i * c.work.bank_stride, c.batch.n_tok, c.model().hidden};
}

// x = x + a, or a alone at a restart, and what follows: whether it is finite, the mix, the norm, the bank. `a` empty: x is
// as it should be. `trace`: names of x and of the mix's weights.
void mixed_input(StepContext& c, MixStep step, int il, const char* x_trace, int x_layer,
                 const char* probs_trace) {
  step.y = c.work.y;
  step.x = c.work.x;
  step.bank = c.work.bank;
  step.bank_stride = c.work.bank_stride;
  step.eps = c.model().rms_eps;
  if (c.probe == nullptr && c.backend.fused_mix(step)) return;
  if (!step.add.empty()) {
    c.backend.residual(step.x, step.add, step.restart);
    if (step.first_nonfinite != nullptr)
      c.backend.note_nonfinite(step.x, step.layer, step.first_nonfinite);
    c.see(x_trace, x_layer, step.x);
  }
  float* probs = c.probe != nullptr && step.n_bank > 0 ? c.work.probs.data : nullptr;
  c.backend.mix_norm(step.y, step.x, step.bank, step.n_bank, step.bank_stride, step.score_w,
                     step.norm_w, step.eps, probs);
  if (probs != nullptr)
    c.see(probs_trace, il, View<const float>(probs, c.batch.n_tok, step.n_bank + 1));
  if (step.push != nullptr) {
    c.backend.copy_rows(View<float>(step.push, step.x.rows, step.x.cols), step.x);
  }
}

}  // namespace

void embed_phase(StepContext& c, int) {
  c.backend.embed(c.work.x, c.batch, c.weights.matrix(Role::kTokenEmbd),
                  c.plan.vocab_in(c.rank).begin);
}

void attention_input(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  if (il == 0) c.see("inp_embd", -1, c.work.x);
  MixStep step;
  if (il > c.plan.layers(c.rank).begin) {
    c.see("ffn_out", il - 1, c.work.a);
    step.add = c.work.a;
    step.layer = il - 1;
    step.first_nonfinite = c.first_nonfinite;
  }
  step.n_bank = m.bank_before(il);
  // blk.0.attn_res_score is in the file but never used: the bank is still empty.
  step.score_w = step.n_bank > 0 ? c.weights.vec(Role::kAttnResScore, il) : nullptr;
  step.norm_w = c.weights.vec(Role::kAttnNorm, il);
  // The raw stream is banked, not the mixed one.
  if (il % m.bank_block == 0) step.push = bank_entry(c, il / m.bank_block).data;
  mixed_input(c, step, il, "l_out", il - 1, "res_probs_attn");
  c.see("attn_norm", il, c.work.y);
}

void ffn_input(StepContext& c, int il) {
  const ModelConfig& m = c.model();
  MixStep step;
  step.add = c.work.a;
  // At a banked layer the stream restarts from the attention output alone.
  step.restart = il % m.bank_block == 0;
  step.n_bank = m.bank_size(il);
  step.score_w = c.weights.vec(Role::kFfnResScore, il);
  step.norm_w = c.weights.vec(Role::kFfnNorm, il);
  mixed_input(c, step, il, "prefix_sum_attn", il, "res_probs_ffn");
  c.see("ffn_norm", il, c.work.y);
}

View<float> gated_hidden(StepContext& c, int il, Role gate, Role up,
                         std::span<const MatmulJob> beside) {
  const Weight &w_gate = c.weights.matrix(gate, il), &w_up = c.weights.matrix(up, il);
  const View<float> g(c.work.ffn_g.data, c.batch.n_tok, w_gate.n_out);
  const View<float> u(c.work.ffn_u.data, c.batch.n_tok, w_gate.n_out);
  Operand y;
  y.x = c.work.y;
  y.situ = c.model().situ;
  std::vector<FusedProduct> products;
  for (const MatmulJob& job : beside)
    products.push_back({job.y, FusedProduct::Join::kOne, {job.w, 0}, {}});
  products.push_back({g, FusedProduct::Join::kSitu, {&w_gate, 0}, {&w_up, 0}});
  if (c.fused({&y, 1}, products)) return g;
  std::vector<MatmulJob> jobs(beside.begin(), beside.end());
  jobs.push_back({g, c.work.y, &w_gate});
  jobs.push_back({u, c.work.y, &w_up});
  c.backend.matmul(jobs);
  c.backend.situ(g, u, c.model().situ);
  return g;
}

void dense_phase(StepContext& c, int il) {
  ffn_input(c, il);
  const View<float> hidden = gated_hidden(c, il, Role::kDenseGate, Role::kDenseUp);
  const MatmulJob down{c.work.a, hidden, &c.weights.matrix(Role::kDenseDown, il)};
  c.backend.matmul({&down, 1});
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
    if (l.is_mla && plan.layout().cuts_rows()) {
      program.push_back({"mla query", il, mla_query_phase, Point::kMlaQuery});
      program.push_back({"mla rows", il, mla_rows_phase, Point::kMlaParts});
      program.push_back({"mla join", il, mla_join_phase, Point::kAttnOut});
    } else {
      program.push_back({l.is_mla ? "mla" : "kda", il, l.is_mla ? mla_phase : kda_phase,
                         when(full, Point::kAttnOut)});
    }
    if (l.is_dense) {
      program.push_back({"dense", il, dense_phase, when(full, Point::kFfnOut)});
    } else {
      program.push_back({"moe route", il, moe_route_phase, when(full, Point::kRouterLatent)});
      program.push_back({"moe experts", il, moe_experts_phase, when(cut, Point::kMoeLatent)});
      program.push_back({"moe join", il, moe_join_phase, when(full, Point::kFfnOut)});
    }
  }
  if (!layers.empty())
    program.push_back({"close", static_cast<int>(layers.end) - 1, close_layer_phase});
  return program;
}

}  // namespace k3
