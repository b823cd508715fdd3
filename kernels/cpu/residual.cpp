#include <algorithm>
#include <cmath>

#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

void softmax(float* s, std::int64_t n) {
  const float top = *std::max_element(s, s + n);
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    s[i] = exp_f32(s[i] - top);
    sum += s[i];
  }
  for (std::int64_t i = 0; i < n; ++i) s[i] = static_cast<float>(s[i] / sum);
}

}  // namespace

float inverse_rms(const KernelTable& table, const float* x, std::int64_t n, float eps) {
  const double mean = table.sum_squares(x, n) / static_cast<double>(n);
  return 1.0f / std::sqrt(static_cast<float>(mean) + eps);
}

void mix_norm(Ops& ops, View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
              std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
              float* probs) {
  const std::int64_t d = x.cols;
  const KernelTable& k = ops.table;
  // Per thread: probabilities, then the mixed stream.
  ops.pool.reserve(static_cast<std::size_t>(n_bank + 16 + d));
  ops.pool.split(x.rows, 4 * (n_bank + 1) * d, [&](std::int64_t begin, std::int64_t end, int th) {
    float *p = ops.pool.scratch(th), *mixed = p + n_bank + 16;
    for (std::int64_t t = begin; t < end; ++t) {
      const float* stream = x.row(t);
      if (n_bank > 0) {
        const auto source = [&](std::int64_t s) {
          return s < n_bank ? bank + s * bank_stride + t * d : x.row(t);
        };
        // Scores use the normalised sources, the sum below the raw ones.
        for (std::int64_t s = 0; s <= n_bank; ++s) {
          p[s] = k.dot(score_w, source(s), d) * inverse_rms(k, source(s), d, eps);
        }
        softmax(p, n_bank + 1);
        std::fill_n(mixed, d, 0.0f);
        for (std::int64_t s = 0; s <= n_bank; ++s) k.add_scaled(mixed, p[s], source(s), d);
        if (probs != nullptr) std::copy(p, p + n_bank + 1, probs + t * (n_bank + 1));
        stream = mixed;
      }
      k.scale_by(y.row(t), stream, inverse_rms(k, stream, d, eps), norm_w, d);
    }
  });
}

void rms_norm(Ops& ops, View<float> y, View<const float> x, const float* w, float eps) {
  ops.pool.split(x.rows, 2 * x.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      ops.table.scale_by(y.row(t), x.row(t), inverse_rms(ops.table, x.row(t), x.cols, eps), w,
                         x.cols);
    }
  });
}

void residual(Ops& ops, View<float> x, View<const float> a, bool restart) {
  if (restart) return copy_rows(x, a);
  for (std::int64_t t = 0; t < x.rows; ++t) ops.table.add_scaled(x.row(t), 1.0f, a.row(t), x.cols);
}

void copy_rows(View<float> y, View<const float> x) {
  for (std::int64_t t = 0; t < x.rows; ++t) std::copy_n(x.row(t), x.cols, y.row(t));
}

void unpack_bands(View<float> a, View<float> b, View<const float> all,
                  std::span<const std::int64_t> a_widths, std::span<const std::int64_t> b_widths) {
  std::int64_t from = 0, a_at = 0, b_at = 0;
  for (std::size_t r = 0; r < a_widths.size(); ++r) {
    copy_rows(a.columns(a_at, a_widths[r]), all.columns(from, a_widths[r]));
    copy_rows(b.columns(b_at, b_widths[r]), all.columns(from + a_widths[r], b_widths[r]));
    from += a_widths[r] + b_widths[r];
    a_at += a_widths[r];
    b_at += b_widths[r];
  }
}

void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first) {
  for (std::int64_t t = 0; t < x.rows; ++t) {
    // x - x is 0 for a finite x and NaN otherwise: one sum to look at, which the compiler can vectorise.
    const float* row = x.row(t);
    float s[16] = {};
    std::int64_t i = 0;
    for (; i + 16 <= x.cols; i += 16) {
      for (int l = 0; l < 16; ++l) s[l] += row[i + l] - row[i + l];
    }
    for (; i < x.cols; ++i) s[0] += row[i] - row[i];
    if (std::all_of(s, s + 16, [](float v) { return v == 0.0f; })) continue;
    first[t] = std::min(first[t], layer);
  }
}

}  // namespace k3::cpu
