// The elementwise loops of kernel_table.h, written to be vectorised. Templates on the instruction set for the reason given
// in decode_blocks.h. With contraction off and a fixed order of additions all of them give the same bits.
#pragma once

#include <cstdint>

#include "kernels/cpu/elementary.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/half.h"

namespace k3::cpu {

template <class Isa>
struct Loops {
  static void add_scaled(float* y, float a, const float* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] += a * x[i];
  }

  static void add_rows(float* y, const float* p, const float* rows, std::int64_t stride,
                       std::int64_t n_row, std::int64_t n) {
    for (std::int64_t s = 0; s < n_row; ++s) add_scaled(y, p[s], rows + s * stride, n);
  }

  static void scale_by(float* y, const float* x, float s, const float* w, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * s * w[i];
  }

  // Eight sums, element i in sum i % 8, combined pairwise.
  static double sum_squares(const float* x, std::int64_t n) {
    double acc[8] = {};
    std::int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int l = 0; l < 8; ++l) acc[l] += static_cast<double>(x[i + l]) * x[i + l];
    }
    for (int l = 0; i + l < n; ++l) acc[l] += static_cast<double>(x[i + l]) * x[i + l];
    return ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]));
  }

  static void sigmoid_gate(float* y, const float* gate, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] *= sigmoid(gate[i]);
  }

  static void situ(float* g, const float* u, std::int64_t n, Situ p) {
    if (p.lambda > 0) {
      for (std::int64_t i = 0; i < n; ++i) {
        g[i] = p.beta * tanh_f32(g[i] / p.beta) * sigmoid(g[i]) *
               (p.lambda * tanh_f32(u[i] / p.lambda));
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        g[i] = p.beta * tanh_f32(g[i] / p.beta) * sigmoid(g[i]) * u[i];
      }
    }
  }

  static void exp(float* y, const float* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = exp_f32(x[i]);
  }

  static float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(exp_f32(x)); }

  static void kda_gates(float* g, const float* dt, std::int64_t n, float a, bool safe,
                        float lower_bound) {
    if (safe) {
      for (std::int64_t i = 0; i < n; ++i) g[i] = lower_bound * sigmoid(-a * (g[i] + dt[i]));
    } else {
      for (std::int64_t i = 0; i < n; ++i) g[i] = a * softplus(g[i] + dt[i]);
    }
  }

  static void conv_silu(float* y, const float* conv, const float* const* tap, std::int64_t taps,
                        std::int64_t n) {
    if (taps == 4) {  // every known model
      const float *t0 = tap[0], *t1 = tap[1], *t2 = tap[2], *t3 = tap[3];
      for (std::int64_t c = 0; c < n; ++c) {
        const float* w = conv + 4 * c;
        const float z = ((w[0] * t0[c] + w[1] * t1[c]) + w[2] * t2[c]) + w[3] * t3[c];
        y[c] = z * sigmoid(z);
      }
      return;
    }
    for (std::int64_t c = 0; c < n; ++c) {
      float z = 0;
      for (std::int64_t j = 0; j < taps; ++j) z += conv[c * taps + j] * tap[j][c];
      y[c] = z * sigmoid(z);
    }
  }

  // Every column of the state is a story of its own, so columns can be taken in blocks, each through all tokens.
  static void delta_columns(const DeltaJob& d, std::int64_t j0, std::int64_t j1) {
    const std::int64_t n = d.head_dim, m = j1 - j0;
    float pred[kDeltaBlock], out[kDeltaBlock];
    for (std::int64_t t = 0; t < d.n_tok; ++t) {
      const float *q = d.q + t * d.q_stride, *k = d.k + t * d.k_stride,
                  *v = d.v + t * d.v_stride + j0, *decay = d.decay + t * d.decay_stride;
      const float beta = d.beta[t * d.beta_stride];
      for (std::int64_t j = 0; j < m; ++j) pred[j] = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        float* row = d.s + i * n + j0;
        for (std::int64_t j = 0; j < m; ++j) {
          row[j] *= decay[i];
          pred[j] += row[j] * k[i];
        }
      }
      for (std::int64_t j = 0; j < m; ++j) {
        pred[j] = beta * (v[j] - pred[j]);
        out[j] = 0;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        float* row = d.s + i * n + j0;
        const float qi = q[i] * d.scale;
        for (std::int64_t j = 0; j < m; ++j) {
          row[j] += k[i] * pred[j];
          out[j] += row[j] * qi;
        }
      }
      for (std::int64_t j = 0; j < m; ++j) d.o[t * d.o_stride + j0 + j] = out[j];
    }
  }

  static void halves(float* y, const std::uint16_t* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = half_to_float(x[i]);
  }
  static void bf16s(float* y, const std::uint16_t* x, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = bf16_to_float(x[i]);
  }
};

}  // namespace k3::cpu
