#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/ops.h"
#include "kernels/half.h"

namespace k3::cpu {
namespace {

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

const float* load_row(const MlaCache& c, const std::byte* from, float* scratch) {
  const std::int64_t n = c.kv_latent + c.rope;
  const auto* h = reinterpret_cast<const std::uint16_t*>(from);
  switch (c.type) {
    case CacheType::kF32:
      return reinterpret_cast<const float*>(from);
    case CacheType::kF16:
      for (std::int64_t i = 0; i < n; ++i) scratch[i] = half_to_float(h[i]);
      break;
    case CacheType::kBF16:
      for (std::int64_t i = 0; i < n; ++i) scratch[i] = bf16_to_float(h[i]);
      break;
  }
  return scratch;
}

K3_CLONES void accumulate(float* ctx, float p, const float* row, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) ctx[i] += p * row[i];
}

// All heads of one token: each cached row is read once for scores and once for values.
void attend_token(float* ctx, const float* q, std::int64_t n_head, float scale,
                  const MlaCache& cache, const std::byte* rows, std::int64_t n_row) {
  const std::int64_t width = cache.kv_latent + cache.rope, bytes = row_bytes(cache);
  std::vector<float> scratch(static_cast<std::size_t>(width));
  std::vector<float> p(static_cast<std::size_t>(n_head * n_row));
  for (std::int64_t s = 0; s < n_row; ++s) {
    const float* row = load_row(cache, rows + s * bytes, scratch.data());
    for (std::int64_t h = 0; h < n_head; ++h) {
      p[static_cast<std::size_t>(h * n_row + s)] = dot(q + h * width, row, width) * scale;
    }
  }
  for (std::int64_t h = 0; h < n_head; ++h) {
    float* ph = p.data() + h * n_row;
    const float top = *std::max_element(ph, ph + n_row);
    double sum = 0;
    for (std::int64_t s = 0; s < n_row; ++s) {
      ph[s] = std::exp(ph[s] - top);
      sum += ph[s];
    }
    for (std::int64_t s = 0; s < n_row; ++s) ph[s] = static_cast<float>(ph[s] / sum);
  }
  std::fill_n(ctx, n_head * cache.kv_latent, 0.0f);
  for (std::int64_t s = 0; s < n_row; ++s) {
    const float* row = load_row(cache, rows + s * bytes, scratch.data());
    for (std::int64_t h = 0; h < n_head; ++h) {
      accumulate(ctx + h * cache.kv_latent, p[static_cast<std::size_t>(h * n_row + s)], row,
                 cache.kv_latent);
    }
  }
}

// What n_row rows say to each head of one token: part [n_head, 2 + kv_latent], [m | l | v] as kernels/backend.h has it. Each
// cached row is read once for scores and once for values.
void attend_rows(float* part, const float* q, std::int64_t n_head, float scale,
                 const MlaCache& cache, const std::byte* rows, std::int64_t n_row) {
  const std::int64_t width = cache.kv_latent + cache.rope, bytes = row_bytes(cache),
                     one = cache.kv_latent + 2;
  std::vector<float> scratch(static_cast<std::size_t>(width));
  std::vector<float> p(static_cast<std::size_t>(n_head * n_row));
  for (std::int64_t s = 0; s < n_row; ++s) {
    const float* row = load_row(cache, rows + s * bytes, scratch.data());
    for (std::int64_t h = 0; h < n_head; ++h) {
      p[static_cast<std::size_t>(h * n_row + s)] = dot(q + h * width, row, width) * scale;
    }
  }
  std::fill_n(part, n_head * one, 0.0f);
  for (std::int64_t h = 0; h < n_head; ++h) {
    float* ph = p.data() + h * n_row;
    const float top =
        n_row == 0 ? -std::numeric_limits<float>::infinity() : *std::max_element(ph, ph + n_row);
    double sum = 0;
    for (std::int64_t s = 0; s < n_row; ++s) {
      ph[s] = std::exp(ph[s] - top);
      sum += ph[s];
    }
    part[h * one] = top;
    part[h * one + 1] = static_cast<float>(sum);
  }
  for (std::int64_t s = 0; s < n_row; ++s) {
    const float* row = load_row(cache, rows + s * bytes, scratch.data());
    for (std::int64_t h = 0; h < n_head; ++h) {
      accumulate(part + h * one + 2, p[static_cast<std::size_t>(h * n_row + s)], row,
                 cache.kv_latent);
    }
  }
}

}  // namespace

void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                const BatchView& batch) {
  const std::int64_t width = cache.kv_latent + cache.rope, bytes = row_bytes(cache);
  std::vector<float> row(static_cast<std::size_t>(width));
  for (std::int64_t t = 0; t < batch.n_tok; ++t) {
    if (!cache.shard.keeps(batch.pos[t])) continue;
    rms_norm(View<float>(row.data(), 1, cache.kv_latent),
             View<const float>(c.row(t), 1, cache.kv_latent), w, eps, 1);
    std::copy_n(c.row(t) + cache.kv_latent, cache.rope, row.data() + cache.kv_latent);
    const std::int64_t at = batch.slot[t] * cache.n_ctx + cache.shard.rows(batch.pos[t]);
    store_row(cache, cache.rows + at * bytes, row.data());
  }
}

void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                const MlaCache& cache, const BatchView& batch, int threads) {
  if (n_head == 0) return;
  const std::int64_t bytes = row_bytes(cache);
  // Later tokens see more rows: small pieces keep the threads even.
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (std::int64_t t = 0; t < batch.n_tok; ++t) {
    attend_token(ctx.row(t), q.row(t), n_head, scale, cache,
                 cache.rows + batch.slot[t] * cache.n_ctx * bytes, batch.pos[t] + 1);
  }
}

void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head, float scale,
                     const MlaCache& cache, const BatchView& batch, int threads) {
  if (n_head == 0) return;
  const std::int64_t bytes = row_bytes(cache);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (std::int64_t t = 0; t < batch.n_tok; ++t) {
    attend_rows(part.row(t), q.row(t), n_head, scale, cache,
                cache.rows + batch.slot[t] * cache.n_ctx * bytes,
                cache.shard.rows(batch.pos[t] + 1));
  }
}

void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part,
                 std::int64_t n_head) {
  if (n_head == 0) return;
  const std::int64_t latent = ctx.cols / n_head;
  for (std::int64_t t = 0; t < ctx.rows; ++t) {
    for (std::int64_t h = 0; h < n_head; ++h) {
      const auto part = [&](std::int64_t p) {
        return parts.row(p * ctx.rows + t) + h * (latent + 2);
      };
      float top = part(0)[0], sum = 0, *out = ctx.row(t) + h * latent;
      for (std::int64_t p = 1; p < n_part; ++p) top = std::max(top, part(p)[0]);
      std::fill_n(out, latent, 0.0f);
      for (std::int64_t p = 0; p < n_part; ++p) {
        if (part(p)[1] == 0) continue;  // without rows
        const float weight = std::exp(part(p)[0] - top);
        sum += part(p)[1] * weight;
        accumulate(out, weight, part(p) + 2, latent);
      }
      for (std::int64_t i = 0; i < latent; ++i) out[i] /= sum;
    }
  }
}

void sigmoid_gate(View<float> y, View<const float> gate, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t t = 0; t < y.rows; ++t) {
    for (std::int64_t i = 0; i < y.cols; ++i) y.row(t)[i] *= sigmoid(gate.row(t)[i]);
  }
}

}  // namespace k3::cpu
