#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

// One token through one head: decay, delta rule, read-out. s: [n key][n value].
K3_CLONES void delta_step(float* s, std::int64_t n, const float* q, const float* k, const float* v,
                          const float* g, float beta, float scale, float* pred, float* o) {
  std::fill_n(pred, n, 0.0f);
  for (std::int64_t i = 0; i < n; ++i) {
    const float decay = std::exp(g[i]);
    float* row = s + i * n;
    for (std::int64_t j = 0; j < n; ++j) {
      row[j] *= decay;
      pred[j] += row[j] * k[i];
    }
  }
  for (std::int64_t j = 0; j < n; ++j) pred[j] = beta * (v[j] - pred[j]);
  std::fill_n(o, n, 0.0f);
  for (std::int64_t i = 0; i < n; ++i) {
    float* row = s + i * n;
    const float qi = q[i] * scale;
    for (std::int64_t j = 0; j < n; ++j) {
      row[j] += k[i] * pred[j];
      o[j] += row[j] * qi;
    }
  }
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Channels [c0, c1) of one segment: taps reach back into the window for the first tokens, then into u itself.
void conv_channels(View<float> qkv, View<const float> u, const float* conv, float* window,
                   std::int64_t taps, std::int64_t t0, std::int64_t t1, std::int64_t c0,
                   std::int64_t c1) {
  const std::int64_t width = u.cols;
  const std::int64_t past = taps - 1;
  auto input = [&](std::int64_t t,
                   std::int64_t c) {  // t relative to t0; negative: the window, oldest first
    return t >= 0 ? u.row(t0 + t)[c] : window[(past + t) * width + c];
  };
  for (std::int64_t t = 0; t < t1 - t0; ++t) {
    for (std::int64_t c = c0; c < c1; ++c) {
      float z = 0;
      for (std::int64_t j = 0; j < taps; ++j) z += conv[c * taps + j] * input(t - past + j, c);
      qkv.row(t0 + t)[c] = z * sigmoid(z);
    }
  }
  // The new window may overlap the old one when the segment is shorter than it: oldest first keeps that right.
  const std::int64_t n = t1 - t0;
  for (std::int64_t w = 0; w < past; ++w) {
    for (std::int64_t c = c0; c < c1; ++c) window[w * width + c] = input(n - past + w, c);
  }
}

}  // namespace

void kda_conv(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
              const BatchView& batch, int threads) {
  const std::int64_t width = u.cols;
  const std::int64_t window_elems = (state.conv_kernel - 1) * width;
  for (std::int64_t s = 0; s < batch.n_seg; ++s) {
    const std::int64_t t0 = batch.seg_begin[s], t1 = batch.seg_begin[s + 1];
    if (t0 == t1) continue;
    float* window = state.window + batch.slot[t0] * window_elems;
    if (batch.pos[t0] == 0) std::fill_n(window, window_elems, 0.0f);
    constexpr std::int64_t kChunk = 128;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (std::int64_t c0 = 0; c0 < width; c0 += kChunk) {
      conv_channels(qkv, u, conv, window, state.conv_kernel, t0, t1, c0,
                    std::min(c0 + kChunk, width));
    }
  }
}

void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps) {
  for (std::int64_t t = 0; t < y.rows; ++t) {
    for (std::int64_t c = 0; c + head_dim <= y.cols; c += head_dim) {
      float* h = y.row(t) + c;
      double sum = 0;
      for (std::int64_t i = 0; i < head_dim; ++i) sum += static_cast<double>(h[i]) * h[i];
      const float scale = 1.0f / std::max(std::sqrt(static_cast<float>(sum)), eps);
      for (std::int64_t i = 0; i < head_dim; ++i) h[i] *= scale;
    }
  }
}

void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
               std::int64_t head_dim, bool safe_gate, float lower_bound, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t t = 0; t < g.rows; ++t) {
    for (std::int64_t c = 0; c < g.cols; ++c) {
      const float f = g.row(t)[c] + dt[c];
      const float ah = a[c / head_dim];  // -exp(A_log)
      g.row(t)[c] = safe_gate ? lower_bound * sigmoid(-ah * f) : ah * softplus(f);
    }
    for (std::int64_t h = 0; h < beta.cols; ++h) beta.row(t)[h] = sigmoid(beta.row(t)[h]);
  }
}

void kda_scan(View<float> o, View<const float> q, View<const float> k, View<const float> v,
              View<const float> g, View<const float> beta, const KdaState& state,
              const BatchView& batch, int threads) {
  const std::int64_t n = state.head_dim, heads = state.n_head;
  const float scale = 1.0f / std::sqrt(static_cast<float>(n));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (std::int64_t job = 0; job < heads * batch.n_seg; ++job) {
    const std::int64_t h = job % heads, seg = job / heads;
    const std::int64_t t0 = batch.seg_begin[seg], t1 = batch.seg_begin[seg + 1];
    if (t0 == t1) continue;
    float* s = state.s + (batch.slot[t0] * heads + h) * n * n;
    if (batch.pos[t0] == 0) std::fill_n(s, n * n, 0.0f);
    std::vector<float> pred(static_cast<std::size_t>(n));
    for (std::int64_t t = t0; t < t1; ++t) {
      const std::int64_t c = h * n;
      delta_step(s, n, q.row(t) + c, k.row(t) + c, v.row(t) + c, g.row(t) + c, beta.row(t)[h],
                 scale, pred.data(), o.row(t) + c);
    }
  }
}

void kda_output_gate(View<float> o, View<const float> gate, const float* w, std::int64_t head_dim,
                     float eps) {
  for (std::int64_t t = 0; t < o.rows; ++t) {
    for (std::int64_t c = 0; c + head_dim <= o.cols; c += head_dim) {
      View<float> head(o.row(t) + c, 1, head_dim);
      rms_norm(head, head, w, eps, 1);
      for (std::int64_t i = 0; i < head_dim; ++i) head.data[i] *= sigmoid(gate.row(t)[c + i]);
    }
  }
}

}  // namespace k3::cpu
