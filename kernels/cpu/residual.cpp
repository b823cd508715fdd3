#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

// 1 / sqrt(mean(x^2) + eps), the sum in double as the reference does.
K3_CLONES float inverse_rms(const float* x, std::int64_t n, float eps) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return 1.0f / std::sqrt(static_cast<float>(sum / static_cast<double>(n)) + eps);
}

void softmax(std::vector<float>& s) {
  const float top = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (float& v : s) {
    v = std::exp(v - top);
    sum += v;
  }
  for (float& v : s) v = static_cast<float>(v / sum);
}

}  // namespace

void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
              std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
              float* probs, int threads) {
  const std::int64_t d = x.cols;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t t = 0; t < x.rows; ++t) {
    const float* stream = x.row(t);
    std::vector<float> mixed;
    if (n_bank > 0) {
      auto source = [&](std::int64_t s) {
        return s < n_bank ? bank + s * bank_stride + t * d : x.row(t);
      };
      std::vector<float> p(static_cast<std::size_t>(n_bank + 1));
      // Scores use the normalised sources, the sum below the raw ones.
      for (std::int64_t s = 0; s <= n_bank; ++s) {
        p[static_cast<std::size_t>(s)] =
            dot(score_w, source(s), d) * inverse_rms(source(s), d, eps);
      }
      softmax(p);
      mixed.assign(static_cast<std::size_t>(d), 0.0f);
      for (std::int64_t s = 0; s <= n_bank; ++s) {
        const float ps = p[static_cast<std::size_t>(s)];
        const float* src = source(s);
        for (std::int64_t i = 0; i < d; ++i) mixed[static_cast<std::size_t>(i)] += ps * src[i];
      }
      if (probs != nullptr) std::copy(p.begin(), p.end(), probs + t * (n_bank + 1));
      stream = mixed.data();
    }
    const float scale = inverse_rms(stream, d, eps);
    for (std::int64_t i = 0; i < d; ++i) y.row(t)[i] = stream[i] * scale * norm_w[i];
  }
}

void rms_norm(View<float> y, View<const float> x, const float* w, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t t = 0; t < x.rows; ++t) {
    const float scale = inverse_rms(x.row(t), x.cols, eps);
    for (std::int64_t i = 0; i < x.cols; ++i) y.row(t)[i] = x.row(t)[i] * scale * w[i];
  }
}

void residual(View<float> x, View<const float> a, bool restart) {
  for (std::int64_t t = 0; t < x.rows; ++t) {
    for (std::int64_t i = 0; i < x.cols; ++i)
      x.row(t)[i] = restart ? a.row(t)[i] : x.row(t)[i] + a.row(t)[i];
  }
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
    for (std::int64_t i = 0; i < x.cols; ++i) {
      if (std::isfinite(x.row(t)[i])) continue;
      *first = std::min(*first, layer);
      return;
    }
  }
}

}  // namespace k3::cpu
