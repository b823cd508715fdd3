#include <algorithm>
#include <vector>

#include "kernels/check_shapes.h"
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

constexpr std::int64_t kLanes = 16;
// Rows dequantised together: each token's x is then read once for all of them.
constexpr std::int64_t kRowBlock = 4;

float combine(const float (&acc)[kLanes]) {
  float s[kLanes];
  std::copy(acc, acc + kLanes, s);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t l = 0; l < half; ++l) s[l] += s[l + half];
  }
  return s[0];
}

// A row's elements as floats: in place where they are stored so, else decoded into scratch.
const float* row_values(const Weight& w, const std::byte* row, float* scratch) {
  if (w.type == BlockType::kF32) return reinterpret_cast<const float*>(row) + w.first;
  dequantize_range(w.type, row, w.first, w.n_in, scratch);
  return scratch;
}

}  // namespace

K3_CLONES float dot(const float* a, const float* b, std::int64_t n) {
  float acc[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) acc[l] += a[i + l] * b[i + l];
  }
  for (std::int64_t l = 0; i + l < n; ++l) acc[l] += a[i + l] * b[i + l];
  return combine(acc);
}

void matmul(View<float> y, View<const float> x, const Weight& w, std::int64_t mat, int threads) {
  check_shapes({y, x, &w});
  if (y.empty()) return;
  if (w.n_in == 0) {  // an empty band contributes nothing to the sum
    for (std::int64_t t = 0; t < y.rows; ++t) std::fill_n(y.row(t), y.cols, 0.0f);
    return;
  }
  const std::byte* base = w.data + mat * w.mat_bytes;
  const std::int64_t n_block = (w.n_out + kRowBlock - 1) / kRowBlock;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scratch(static_cast<std::size_t>(kRowBlock * w.n_in));
#pragma omp for schedule(static)
    for (std::int64_t b = 0; b < n_block; ++b) {
      const std::int64_t o0 = b * kRowBlock;
      const std::int64_t n = std::min(kRowBlock, w.n_out - o0);
      const float* rows[kRowBlock];
      for (std::int64_t r = 0; r < n; ++r) {
        rows[r] = row_values(w, base + (o0 + r) * w.row_bytes, scratch.data() + r * w.n_in);
      }
      for (std::int64_t t = 0; t < y.rows; ++t) {
        for (std::int64_t r = 0; r < n; ++r) y.row(t)[o0 + r] = dot(x.row(t), rows[r], w.n_in);
      }
    }
  }
}

void embed(View<float> y, const BatchView& batch, const Weight& table, std::int64_t vocab_begin,
           int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t t = 0; t < batch.n_tok; ++t) {
    const std::int64_t row = batch.ids[t] - vocab_begin;
    if (row < 0 || row >= table.n_out) {
      std::fill_n(y.row(t), y.cols, 0.0f);
    } else {
      dequantize_range(table.type, table.data + row * table.row_bytes, table.first, table.n_in,
                       y.row(t));
    }
  }
}

}  // namespace k3::cpu
