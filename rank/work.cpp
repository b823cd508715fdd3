#include <algorithm>

#include "rank/layer.h"

namespace k3 {
namespace {

constexpr std::uint64_t kAlign = 256;  // bytes; what device loads of 16 bytes and more want

// Widest bands of this rank's layers.
struct Widths {
  std::int64_t kda = 0, heads = 0, q = 0, q_abs = 0, ctx = 0, o = 0, packed = 0, ffn = 0, vocab = 0;
  std::int64_t q_all = 0, part = 0;  // of all heads; 0 where the cache is whole
};

Widths widths(const Plan& plan, int rank) {
  const ModelConfig& m = plan.config();
  Widths w;
  const Band layers = plan.layers(rank);
  for (auto il = static_cast<int>(layers.begin); il < layers.end; ++il) {
    const LayerConfig& l = m.layers[static_cast<std::size_t>(il)];
    const std::int64_t heads = plan.heads(rank, il).size();
    w.heads = std::max(w.heads, heads);
    if (l.is_mla) {
      w.q = std::max(w.q, heads * m.key_len);
      w.q_abs = std::max(w.q_abs, heads * m.cache_row());
      w.ctx = std::max(w.ctx, heads * m.kv_latent);
      w.o = std::max(w.o, heads * m.value_len);
      if (plan.layout().cuts_rows()) {
        w.q_all = m.n_head * m.cache_row();
        w.part = m.n_head * (2 + m.kv_latent);
      }
    } else {
      w.kda = std::max(w.kda, heads * m.kda_head_dim);
      w.o = std::max(w.o, heads * m.kda_head_dim);
    }
    if (l.is_dense) {
      w.ffn = std::max(w.ffn, plan.dense_ffn(rank, il).size());
    } else {
      w.packed =
          std::max(w.packed, plan.router_rows(rank, il).size() + plan.latent_rows(rank, il).size());
      w.ffn = std::max(w.ffn, plan.shared_ffn(rank, il).size());
    }
  }
  if (plan.has_head(rank)) w.vocab = plan.vocab_out(rank).size();
  return w;
}

}  // namespace

Work::Work(Backend& backend, const Plan& plan, int rank, std::int64_t max_tok,
           std::int64_t max_logit_rows)
    : max_tok_(max_tok) {
  storage_ = backend.allocate(carve(nullptr, plan, rank, max_logit_rows));
  carve(storage_->data(), plan, rank, max_logit_rows);
  shape(max_tok);
}

std::uint64_t Work::bytes(const Plan& plan, int rank, std::int64_t max_tok,
                          std::int64_t max_logit_rows) {
  return Work(max_tok).carve(nullptr, plan, rank, max_logit_rows);
}

void Work::shape(std::int64_t n_tok) {
  x.rows = n_tok;
  bank_stride = n_tok * x.cols;
  bank = x.data + bank_stride;
  for (View<float>* v : by_tok_) v->rows = n_tok;
  expert_ids.rows = n_tok;
}

std::uint64_t Work::carve(std::byte* base, const Plan& plan, int rank,
                          std::int64_t max_logit_rows) {
  const ModelConfig& m = plan.config();
  const Widths w = widths(plan, rank);
  by_tok_.clear();
  std::uint64_t bytes = 0;
  auto take = [&](std::int64_t rows, std::int64_t cols) {
    auto* at = base != nullptr ? reinterpret_cast<float*>(base + bytes) : nullptr;
    const auto size = static_cast<std::uint64_t>(rows * cols) * sizeof(float);
    bytes += (size + kAlign - 1) / kAlign * kAlign;
    return View<float>(at, rows, cols);
  };
  auto per_tok = [&](View<float>& v, std::int64_t cols) {
    v = take(max_tok_, cols);
    by_tok_.push_back(&v);
  };
  const std::int64_t n_stream = m.bank_before(m.n_layer) + 1;  // the bank at its largest, and x
  x = take(n_stream * max_tok_, m.hidden);
  for (View<float>* v : {&y, &a, &tmp}) per_tok(*v, m.hidden);
  per_tok(u, 3 * w.kda);
  per_tok(qkv, 3 * w.kda);
  per_tok(g, w.kda);
  per_tok(o, w.o);
  per_tok(gate, w.o);
  per_tok(f, m.kda_head_dim);
  per_tok(beta, w.heads);
  per_tok(qa, m.q_latent);
  per_tok(q, w.q);
  per_tok(c, m.cache_row());
  per_tok(q_abs, w.q_abs);
  per_tok(ctx, w.ctx);
  per_tok(q_all, w.q_all);
  per_tok(part, w.part);
  per_tok(parts, plan.layout().tp * w.part);
  per_tok(packed, w.packed);
  per_tok(gathered, m.n_expert + m.moe_latent);
  per_tok(router, m.n_expert);
  per_tok(z, m.moe_latent);
  per_tok(this->m, m.moe_latent);
  per_tok(expert_weights, m.n_expert_used);
  const View<float> ids = take(max_tok_, m.n_expert_used);
  expert_ids =
      View<std::int32_t>(reinterpret_cast<std::int32_t*>(ids.data), max_tok_, m.n_expert_used);
  per_tok(ffn_g, w.ffn);
  per_tok(ffn_u, w.ffn);
  per_tok(probs, n_stream);
  head_in = take(max_logit_rows, m.hidden);
  logits = take(max_logit_rows, w.vocab);
  return bytes;
}

}  // namespace k3
