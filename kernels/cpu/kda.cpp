#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "kernels/cpu/ops.h"

namespace k3::cpu {
namespace {

constexpr std::int64_t kMostTaps = 16;

// Channels [c0, c1) of one segment: taps reach back into the window for the first tokens, then into u itself.
void conv_channels(const KernelTable& k, View<float> qkv, View<const float> u, const float* conv,
                   float* window, std::int64_t taps, std::int64_t t0, std::int64_t t1,
                   std::int64_t c0, std::int64_t c1) {
  const std::int64_t past = taps - 1;
  // t relative to t0; negative: the window, oldest first
  const auto input = [&](std::int64_t t) {
    return t >= 0 ? u.row(t0 + t) + c0 : window + (past + t) * u.cols + c0;
  };
  const std::int64_t n = t1 - t0;
  std::array<const float*, kMostTaps> tap{};
  for (std::int64_t t = 0; t < n; ++t) {
    for (std::int64_t j = 0; j < taps; ++j) tap[static_cast<std::size_t>(j)] = input(t - past + j);
    k.conv_silu(qkv.row(t0 + t) + c0, conv + c0 * taps, tap.data(), taps, c1 - c0);
  }
  // The new window may overlap the old one when the segment is shorter than it: oldest first keeps that right.
  for (std::int64_t w = 0; w < past; ++w) {
    const float* from = input(n - past + w);
    std::copy(from, from + (c1 - c0), window + w * u.cols + c0);
  }
}

}  // namespace

void kda_conv(Ops& ops, View<float> qkv, View<const float> u, const float* conv,
              const KdaState& state, const BatchView& batch) {
  const std::int64_t width = u.cols;
  const std::int64_t window_elems = (state.conv_kernel - 1) * width;
  if (state.conv_kernel < 1 || state.conv_kernel > kMostTaps) {
    throw std::invalid_argument("kda_conv: " + std::to_string(state.conv_kernel) +
                                " taps; expected 1 to " + std::to_string(kMostTaps));
  }
  constexpr std::int64_t kChunk = 128;
  for (std::int64_t s = 0; s < batch.n_seg; ++s) {
    const std::int64_t t0 = batch.seg_begin[s], t1 = batch.seg_begin[s + 1];
    if (t0 == t1) continue;
    float* window = state.window + batch.slot[t0] * window_elems;
    if (batch.pos[t0] == 0) std::fill_n(window, window_elems, 0.0f);
    ops.pool.split((width + kChunk - 1) / kChunk, 8 * kChunk * (t1 - t0),
                   [&](std::int64_t begin, std::int64_t end, int) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       conv_channels(ops.table, qkv, u, conv, window, state.conv_kernel, t0, t1,
                                     i * kChunk, std::min((i + 1) * kChunk, width));
                     }
                   });
  }
}

void l2_norm_heads(Ops& ops, View<float> y, std::int64_t head_dim, float eps) {
  ops.pool.split(y.rows, 3 * y.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t c = 0; c + head_dim <= y.cols; c += head_dim) {
        float* h = y.row(t) + c;
        const auto norm = std::sqrt(static_cast<float>(ops.table.sum_squares(h, head_dim)));
        const float scale = 1.0f / std::max(norm, eps);
        for (std::int64_t i = 0; i < head_dim; ++i) h[i] *= scale;
      }
    }
  });
}

void kda_gates(Ops& ops, View<float> g, View<float> beta, const float* dt, const float* a,
               std::int64_t head_dim, bool safe_gate, float lower_bound) {
  ops.pool.split(g.rows, 8 * g.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t c = 0; c < g.cols; c += head_dim) {  // a = -exp(A_log)
        ops.table.kda_gates(g.row(t) + c, dt + c, head_dim, a[c / head_dim], safe_gate,
                            lower_bound);
      }
      for (std::int64_t h = 0; h < beta.cols; ++h) beta.row(t)[h] = sigmoid(beta.row(t)[h]);
    }
  });
}

void kda_scan(Ops& ops, View<float> o, View<const float> q, View<const float> k,
              View<const float> v, View<const float> g, View<const float> beta,
              const KdaState& state, const BatchView& batch) {
  const std::int64_t n = state.head_dim, heads = state.n_head;
  if (heads == 0 || batch.n_tok == 0) return;
  float* decay = ops.room(batch.n_tok * g.cols);
  ops.pool.split(batch.n_tok, 8 * g.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) ops.table.exp(decay + t * g.cols, g.row(t), g.cols);
  });
  const std::int64_t blocks = (n + kDeltaBlock - 1) / kDeltaBlock;
  const auto piece = [&](std::int64_t i) {
    const std::int64_t block = i % blocks, h = i / blocks % heads, seg = i / blocks / heads;
    const std::int64_t t0 = batch.seg_begin[seg], t1 = batch.seg_begin[seg + 1];
    if (t0 == t1) return;
    const std::int64_t j0 = block * kDeltaBlock, j1 = std::min(j0 + kDeltaBlock, n), c = h * n;
    DeltaJob d;
    d.s = state.s + (batch.slot[t0] * heads + h) * n * n;
    if (batch.pos[t0] == 0) {
      for (std::int64_t r = 0; r < n; ++r) std::fill_n(d.s + r * n + j0, j1 - j0, 0.0f);
    }
    d.head_dim = n;
    d.n_tok = t1 - t0;
    d.q = q.row(t0) + c;
    d.k = k.row(t0) + c;
    d.v = v.row(t0) + c;
    d.q_stride = q.stride;
    d.k_stride = k.stride;
    d.v_stride = v.stride;
    d.decay = decay + t0 * g.cols + c;
    d.decay_stride = g.cols;
    d.beta = beta.row(t0) + h;
    d.beta_stride = beta.stride;
    d.scale = 1.0f / std::sqrt(static_cast<float>(n));
    d.o = o.row(t0) + c;
    d.o_stride = o.stride;
    ops.table.delta_columns(d, j0, j1);
  };
  // The thread that first touches a head's state keeps it: its memory is near that thread.
  ops.pool.split(blocks * heads * batch.n_seg, n * kDeltaBlock * batch.n_tok / batch.n_seg,
                 [&](std::int64_t begin, std::int64_t end, int) {
                   for (std::int64_t i = begin; i < end; ++i) piece(i);
                 });
}

void kda_output_gate(Ops& ops, View<float> o, View<const float> gate, const float* w,
                     std::int64_t head_dim, float eps) {
  ops.pool.split(o.rows, 8 * o.cols, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t c = 0; c + head_dim <= o.cols; c += head_dim) {
        float* head = o.row(t) + c;
        ops.table.scale_by(head, head, inverse_rms(ops.table, head, head_dim, eps), w, head_dim);
      }
      ops.table.sigmoid_gate(o.row(t), gate.row(t), o.cols / head_dim * head_dim);
    }
  });
}

}  // namespace k3::cpu
