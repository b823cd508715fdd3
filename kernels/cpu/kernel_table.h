// The inner loops of the CPU ops, once for each instruction set. The plain table runs everywhere and defines the results;
// the others differ from it by the order and fusing of the additions in a product, nothing else: decoded weights and
// elementwise functions have the same bits. Tables of one machine are all tested against the plain one.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/backend.h"

namespace k3::cpu {

// Part of a product: y[t, o] = x[t] . w[o] for rows o of one matrix and every token.
struct RowsJob {
  const std::byte* w = nullptr;  // row 0
  std::int64_t row_bytes = 0;
  BlockType type = BlockType::kF32;
  std::int64_t first = 0;  // elements before the band in a row's first block
  std::int64_t n_in = 0;
  std::int64_t n_out = 0;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  float* y = nullptr;
  std::int64_t y_stride = 0;
  std::int64_t n_tok = 0;
};

// Columns of one KDA head's state and what moves through them, tokens in order. decay = exp(g). Strides: floats from one
// token to the next.
struct DeltaJob {
  float* s = nullptr;  // [head_dim (key)][head_dim (value)]
  std::int64_t head_dim = 0;
  std::int64_t n_tok = 0;
  const float *q = nullptr, *k = nullptr, *v = nullptr;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  const float* decay = nullptr;
  std::int64_t decay_stride = 0;
  const float* beta = nullptr;
  std::int64_t beta_stride = 0;
  float scale = 1;  // on q
  float* o = nullptr;
  std::int64_t o_stride = 0;
};

// Rows of a product are shared out in panels of this many at least; tables work on that many at once.
inline constexpr std::int64_t kRowBlock = 4;
// Value columns of the KDA state that are taken together: with 128 keys their state stays in the first-level cache.
inline constexpr std::int64_t kDeltaBlock = 64;

struct KernelTable {
  const char* name;  // "plain", "avx2", "avx512"
  // Rows [o0, o1) of the job. scratch: scratch_elems(n_in) floats.
  void (*multiply_rows)(const RowsJob& job, std::int64_t o0, std::int64_t o1, float* scratch);
  // The sum of a[i] * b[i].
  float (*dot)(const float* a, const float* b, std::int64_t n);
  // y += a * x
  void (*add_scaled)(float* y, float a, const float* x, std::int64_t n);
  // y += the sum over s of p[s] * rows[s], rows `stride` floats apart
  void (*add_rows)(float* y, const float* p, const float* rows, std::int64_t stride,
                   std::int64_t n_row, std::int64_t n);
  // y = x * s * w
  void (*scale_by)(float* y, const float* x, float s, const float* w, std::int64_t n);
  // The sum of x[i]^2 in double.
  double (*sum_squares)(const float* x, std::int64_t n);
  // y *= sigmoid(gate)
  void (*sigmoid_gate)(float* y, const float* gate, std::int64_t n);
  // g = situ(g, u)
  void (*situ)(float* g, const float* u, std::int64_t n, Situ p);
  // y = exp(x)
  void (*exp)(float* y, const float* x, std::int64_t n);
  // g = lower_bound * sigmoid(-a * (g + dt)), or a * softplus(g + dt) where safe is false
  void (*kda_gates)(float* g, const float* dt, std::int64_t n, float a, bool safe,
                    float lower_bound);
  // y = silu(sum_j conv[c * taps + j] * tap[j][c])
  void (*conv_silu)(float* y, const float* conv, const float* const* tap, std::int64_t taps,
                    std::int64_t n);
  // The gated delta rule on columns [j0, j1), at most kDeltaBlock of them.
  void (*delta_columns)(const DeltaJob& job, std::int64_t j0, std::int64_t j1);
  void (*half_to_float)(float* y, const std::uint16_t* x, std::int64_t n);
  void (*bf16_to_float)(float* y, const std::uint16_t* x, std::int64_t n);
};

// Rows that are decoded together when there are many tokens, so that they stay in the first-level cache.
inline std::int64_t panel_rows(std::int64_t n_in) {
  constexpr std::int64_t kPanelElems = 6144;
  std::int64_t rows = kRowBlock;
  while (rows < 32 && 2 * rows * n_in <= kPanelElems) rows *= 2;
  return rows;
}
inline std::int64_t scratch_elems(std::int64_t n_in) { return panel_rows(n_in) * (n_in + 16); }

const KernelTable& plain_table();
// The tables this processor can run, plain first, fastest last. On other architectures than x86-64: plain alone.
std::vector<const KernelTable*> usable_tables();
// The last of them.
const KernelTable& best_table();

}  // namespace k3::cpu
