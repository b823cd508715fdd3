#include <algorithm>
#include <limits>
#include <stdexcept>

#include "kernels/cpu/ops.h"
#include "kernels/half.h"

namespace k3::cpu {
namespace {

// Cache rows that are scored together. From position 0 on, whatever the chunk, so that it does not show in the result.
constexpr std::int64_t kBlock = 64;

std::int64_t row_bytes(const MlaCache& c) {
  return (c.kv_latent + c.rope) * (c.type == CacheType::kF32 ? 4 : 2);
}

void store_row(const MlaCache& c, std::byte* to, const float* from) {
  const std::int64_t n = c.kv_latent + c.rope;
  auto* h = reinterpret_cast<std::uint16_t*>(to);
  switch (c.type) {
    case CacheType::kF32:
      std::copy_n(from, n, reinterpret_cast<float*>(to));
      break;
    case CacheType::kF16:
      for (std::int64_t i = 0; i < n; ++i) h[i] = float_to_half(from[i]);
      break;
    case CacheType::kBF16:
      for (std::int64_t i = 0; i < n; ++i) h[i] = float_to_bf16(from[i]);
      break;
  }
}

// n rows as floats: where they lie, or in scratch.
const float* load_rows(const KernelTable& k, const MlaCache& c, const std::byte* from,
                       std::int64_t n, float* scratch) {
  const std::int64_t elems = n * (c.kv_latent + c.rope);
  if (c.type == CacheType::kF32) return reinterpret_cast<const float*>(from);
  const auto* h = reinterpret_cast<const std::uint16_t*>(from);
  (c.type == CacheType::kF16 ? k.half_to_float : k.bf16_to_float)(scratch, h, elems);
  return scratch;
}

// Some heads of one token against rows 0 .. n_row, block by block: the softmax keeps a running maximum and sum, so that
// memory does not grow with the context.
class Attention {
 public:
  static std::int64_t scratch_floats(std::int64_t n_head, const MlaCache& c) {
    const std::int64_t width = c.kv_latent + c.rope;
    return 4 * n_head + 16 + n_head * kBlock + kBlock * width + scratch_elems(width);
  }

  Attention(const KernelTable& k, const MlaCache& cache, std::int64_t n_head, float* scratch)
      : k_(k), cache_(cache), n_head_(n_head), width_(cache.kv_latent + cache.rope) {
    sum_ = reinterpret_cast<double*>(scratch);  // page-aligned
    top_ = scratch + 2 * n_head;
    p_ = scratch + (4 * n_head + 15) / 16 * 16;
    rows_ = p_ + n_head * kBlock;
    panel_ = rows_ + kBlock * width_;
  }

  // Head h's sum of exp(score - top(h)) * row[0 : kv_latent] goes to values + h * stride; its sum of exp(score - top(h)) is
  // sum(h).
  void run(float* values, std::int64_t stride, const float* q, float scale, const std::byte* rows,
           std::int64_t n_row) {
    std::fill_n(sum_, n_head_, 0.0);
    std::fill_n(top_, n_head_, -std::numeric_limits<float>::infinity());
    for (std::int64_t h = 0; h < n_head_; ++h) {
      std::fill_n(values + h * stride, cache_.kv_latent, 0.0f);
    }
    for (std::int64_t s = 0; s < n_row; s += kBlock) {
      block(values, stride, q, scale, rows + s * row_bytes(cache_), std::min(kBlock, n_row - s));
    }
  }
  float top(std::int64_t h) const { return top_[h]; }
  double sum(std::int64_t h) const { return sum_[h]; }

 private:
  void block(float* values, std::int64_t stride, const float* q, float scale,
             const std::byte* stored, std::int64_t n) {
    const float* rows = load_rows(k_, cache_, stored, n, rows_);
    RowsJob job;
    job.w = reinterpret_cast<const std::byte*>(rows);
    job.row_bytes = width_ * 4;
    job.n_in = width_;
    job.n_out = n;
    job.x = q;
    job.x_stride = width_;
    job.y = p_;
    job.y_stride = kBlock;
    job.n_tok = n_head_;
    k_.multiply_rows(job, 0, n, panel_);
    for (std::int64_t h = 0; h < n_head_; ++h) {
      float *p = p_ + h * kBlock, *c = values + h * stride;
      float top = top_[h];
      for (std::int64_t s = 0; s < n; ++s) {
        p[s] *= scale;
        top = p[s] > top ? p[s] : top;
      }
      if (top > top_[h]) {
        const float shrink = exp_f32(top_[h] - top);
        sum_[h] *= shrink;
        for (std::int64_t i = 0; i < cache_.kv_latent; ++i) c[i] *= shrink;
        top_[h] = top;
      }
      for (std::int64_t s = 0; s < n; ++s) p[s] -= top;
      k_.exp(p, p, n);
      for (std::int64_t s = 0; s < n; ++s) sum_[h] += p[s];
      k_.add_rows(c, p, rows, width_, n, cache_.kv_latent);
    }
  }

  const KernelTable& k_;
  const MlaCache& cache_;
  std::int64_t n_head_, width_;
  double* sum_;
  float *top_, *p_, *rows_, *panel_;
};

// Some heads of one token, and the rows they attend to.
struct Piece {
  std::int64_t tok, h0, n_head;
  const std::byte* rows;
  std::int64_t n_row;
};

// f(attention, piece) for every head of every token, shared out between the threads. kept: only the rows of cache.shard.
template <class F>
void for_heads(Ops& ops, std::int64_t n_head, const MlaCache& cache, const BatchView& batch,
               bool kept, F&& f) {
  if (n_head == 0 || batch.n_tok == 0) return;
  const auto n_row = [&](std::int64_t t) {
    const std::int64_t seen = batch.pos[t] + 1;
    return kept ? cache.shard.rows(seen) : seen;
  };
  // Few tokens: heads are shared out as well. All heads of a token together read its rows once.
  const std::int64_t groups =
      batch.n_tok >= 2 * ops.pool.size() ? 1 : std::min<std::int64_t>(n_head, ops.pool.size());
  ops.pool.reserve(static_cast<std::size_t>(Attention::scratch_floats(n_head, cache)));
  std::int64_t rows = 0;
  for (std::int64_t t = 0; t < batch.n_tok; ++t) rows += n_row(t);
  const std::int64_t cost =
      2 * rows * (cache.kv_latent + cache.rope) * n_head / (batch.n_tok * groups);
  // Later tokens see more rows: small pieces keep the threads even.
  ops.pool.deal(batch.n_tok * groups, cost, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t t = i / groups, g = i % groups;
      const std::int64_t h0 = n_head * g / groups, h1 = n_head * (g + 1) / groups;
      Attention a(ops.table, cache, h1 - h0, ops.pool.scratch(thread));
      f(a, Piece{t, h0, h1 - h0, cache.rows + batch.slot[t] * cache.n_ctx * row_bytes(cache),
                 n_row(t)});
    }
  });
}

}  // namespace

void mla_append(Ops& ops, View<const float> c, const float* w, float eps, const MlaCache& cache,
                const BatchView& batch) {
  const std::int64_t width = cache.kv_latent + cache.rope, bytes = row_bytes(cache);
  float* row = ops.room(width);
  for (std::int64_t t = 0; t < batch.n_tok; ++t) {
    if (!cache.shard.keeps(batch.pos[t])) continue;
    ops.table.scale_by(row, c.row(t), inverse_rms(ops.table, c.row(t), cache.kv_latent, eps), w,
                       cache.kv_latent);
    std::copy_n(c.row(t) + cache.kv_latent, cache.rope, row + cache.kv_latent);
    const std::int64_t at = batch.slot[t] * cache.n_ctx + cache.shard.rows(batch.pos[t]);
    store_row(cache, cache.rows + at * bytes, row);
  }
}

void mla_attend(Ops& ops, View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                const MlaCache& cache, const BatchView& batch) {
  const std::int64_t latent = cache.kv_latent, width = latent + cache.rope;
  if (cache.shard.n_part > 1)
    throw std::invalid_argument(
        "mla_attend: this rank keeps a part of the rows; see mla_attend_part");
  for_heads(ops, n_head, cache, batch, false, [&](Attention& a, const Piece& p) {
    float* out = ctx.row(p.tok) + p.h0 * latent;
    a.run(out, latent, q.row(p.tok) + p.h0 * width, scale, p.rows, p.n_row);
    for (std::int64_t h = 0; h < p.n_head; ++h) {
      const auto inverse = static_cast<float>(1.0 / a.sum(h));
      for (std::int64_t c = 0; c < latent; ++c) out[h * latent + c] *= inverse;
    }
  });
}

void mla_attend_part(Ops& ops, View<float> part, View<const float> q, std::int64_t n_head,
                     float scale, const MlaCache& cache, const BatchView& batch) {
  const std::int64_t one = cache.kv_latent + 2, width = cache.kv_latent + cache.rope;
  for_heads(ops, n_head, cache, batch, true, [&](Attention& a, const Piece& p) {
    float* out = part.row(p.tok) + p.h0 * one;
    a.run(out + 2, one, q.row(p.tok) + p.h0 * width, scale, p.rows, p.n_row);
    for (std::int64_t h = 0; h < p.n_head; ++h) {
      out[h * one] = a.top(h);
      out[h * one + 1] = static_cast<float>(a.sum(h));
    }
  });
}

void mla_combine(Ops& ops, View<float> ctx, View<const float> parts, std::int64_t n_part,
                 std::int64_t n_head) {
  if (n_head == 0) return;
  const std::int64_t latent = ctx.cols / n_head;
  ops.pool.split(ctx.rows, n_part * ctx.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin * n_head; i < end * n_head; ++i) {
      const std::int64_t t = i / n_head, h = i % n_head;
      const auto part = [&](std::int64_t p) {
        return parts.row(p * ctx.rows + t) + h * (latent + 2);
      };
      float top = part(0)[0], sum = 0, *out = ctx.row(t) + h * latent;
      for (std::int64_t p = 1; p < n_part; ++p) top = std::max(top, part(p)[0]);
      std::fill_n(out, latent, 0.0f);
      for (std::int64_t p = 0; p < n_part; ++p) {
        if (part(p)[1] == 0) continue;  // without rows
        const float weight = exp_f32(part(p)[0] - top);
        sum += part(p)[1] * weight;
        ops.table.add_scaled(out, weight, part(p) + 2, latent);
      }
      for (std::int64_t c = 0; c < latent; ++c) out[c] /= sum;
    }
  });
}

void sigmoid_gate(Ops& ops, View<float> y, View<const float> gate) {
  ops.pool.split(y.rows, 8 * y.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t)
      ops.table.sigmoid_gate(y.row(t), gate.row(t), y.cols);
  });
}

}  // namespace k3::cpu
