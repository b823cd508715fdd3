// Products and the delta rule on vectors of 16 floats, for instruction sets of x86-64 that have a fused multiply-add. `Isa`
// gives the vector type and its operations (kernel_avx2.cpp, kernel_avx512.cpp); it lives in an unnamed namespace there, so nothing
// here is shared between files that are compiled for different processors.
//
// Sums are those of the plain dot(), 16 of them combined pairwise, with each step fused. The order does not depend on the
// number of rows or tokens that are worked on together, so a token's values do not depend on its chunk.
#pragma once

#include <cstdint>

#include "kernels/cpu/decode_blocks.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/simd_blocks.h"

namespace k3::cpu {

inline constexpr std::int64_t kLanes = 16;

// ---- products -------------------------------------------------------------------------------------------------------------

template <class Isa>
struct Simd {
  using V = typename Isa::V;

  // R rows against T tokens, all in registers.
  template <int R, int T>
  K3_INLINE static void tile(const float* const* rows, const float* x, std::int64_t x_stride,
                             std::int64_t n, float* y, std::int64_t y_stride) {
    V acc[R * T];
#pragma GCC unroll 16
    for (int i = 0; i < R * T; ++i) acc[i] = Isa::zero();
    const auto step = [&](auto load, std::int64_t at) __attribute__((always_inline)) {
      V w[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) w[r] = load(rows[r] + at);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const V xt = load(x + t * x_stride + at);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t * R + r] = Isa::fma(w[r], xt, acc[t * R + r]);
      }
    };
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      step(
          [](const float* p) __attribute__((always_inline)) { return Isa::load(p); }, i);
    }
    if (i < n) {
      const auto rest = static_cast<int>(n - i);
      step(
          [rest](const float* p) __attribute__((always_inline)) { return Isa::load(p, rest); }, i);
    }
    if constexpr (R == 4 && T == 4) {
      Isa::sum_16(acc, y, y_stride);
    } else {
#pragma GCC unroll 16
      for (int a = 0; a < R * T; ++a) y[a / R * y_stride + a % R] = Isa::sum(acc[a]);
    }
  }

  template <int R>
  static void tokens(const float* const* rows, const RowsJob& job, float* y) {
    std::int64_t t = 0;
    for (; t + Isa::kTokens <= job.n_tok; t += Isa::kTokens) {
      tile<R, Isa::kTokens>(rows, job.x + t * job.x_stride, job.x_stride, job.n_in,
                            y + t * job.y_stride, job.y_stride);
    }
    for (; t < job.n_tok; ++t) {
      tile<R, 1>(rows, job.x + t * job.x_stride, job.x_stride, job.n_in, y + t * job.y_stride,
                 job.y_stride);
    }
  }

  // Up to kRows rows against every token.
  static void rows_by_tokens(const float* const* rows, int n_row, const RowsJob& job, float* y) {
    if (n_row == Isa::kRows) return tokens<Isa::kRows>(rows, job, y);
    for (int r = 0; r < n_row; ++r) tokens<1>(rows + r, job, y + r);
  }

  // Rows that are floats somewhere: a panel of them against a few tokens at a time, so that both stay near.
  static void panel(const float* base, std::int64_t stride, std::int64_t n_row, const RowsJob& job,
                    float* y) {
    constexpr std::int64_t kNearTokens = Isa::kTokens;
    for (std::int64_t t = 0; t < job.n_tok; t += kNearTokens) {
      RowsJob near = job;
      near.x = job.x + t * job.x_stride;
      near.n_tok = job.n_tok - t < kNearTokens ? job.n_tok - t : kNearTokens;
      for (std::int64_t r = 0; r < n_row; r += Isa::kRows) {
        const float* rows[Isa::kRows];
        const auto n = static_cast<int>(n_row - r < Isa::kRows ? n_row - r : Isa::kRows);
        for (int i = 0; i < n; ++i) rows[i] = base + (r + i) * stride;
        rows_by_tokens(rows, n, near, y + t * job.y_stride + r);
      }
    }
  }

  // One token: R rows straight from their blocks.
  template <class Block, int R>
  static void stream_rows(const RowsJob& job, std::int64_t o) {
    using Codec = InRegisters<Isa, Block>;
    const Block* rows[R];
    V acc[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      rows[r] = reinterpret_cast<const Block*>(job.w + (o + r) * job.row_bytes);
      acc[r] = Isa::zero();
    }
    const float* x = job.x;
    for (std::int64_t b = 0; b < job.n_in / kBlockElems<Block>; ++b) {
      for (int g = 0; g < kBlockElems<Block> / Codec::kPiece; ++g, x += Codec::kPiece) {
        const V x0 = Isa::load(x), x1 = Isa::load(x + kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          V v[2];
          Codec::values(rows[r][b], g, v);
          acc[r] = Isa::fma(v[0], x0, acc[r]);
          acc[r] = Isa::fma(v[1], x1, acc[r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) job.y[o + r] = Isa::sum(acc[r]);
  }

  // One token, a type that is decoded in registers and whole blocks: done here.
  static bool streamed(const RowsJob& job, std::int64_t o0, std::int64_t o1) {
    return with_block(
        job.type, [&](auto block) __attribute__((always_inline)) {
          using Block = decltype(block);
          if (job.first != 0 || job.n_in % kBlockElems<Block> != 0) return false;
          std::int64_t o = o0;
          for (; o + kRowBlock <= o1; o += kRowBlock) stream_rows<Block, kRowBlock>(job, o);
          for (; o < o1; ++o) stream_rows<Block, 1>(job, o);
          return true;
        });
  }

  template <class Block>
  static void decode_whole(const std::byte* row, std::int64_t n, float* out) {
    using Codec = InRegisters<Isa, Block>;
    const auto* blocks = reinterpret_cast<const Block*>(row);
    for (std::int64_t b = 0; b < n / kBlockElems<Block>; ++b) {
      for (int g = 0; g < kBlockElems<Block> / Codec::kPiece; ++g, out += Codec::kPiece) {
        V v[2];
        Codec::values(blocks[b], g, v);
        Isa::store(out, v[0]);
        Isa::store(out + kLanes, v[1]);
      }
    }
  }

  static void decode_row(const RowsJob& job, const std::byte* row, float* out) {
    const bool done = with_block(
        job.type, [&](auto block) __attribute__((always_inline)) {
          using Block = decltype(block);
          if (job.first != 0 || job.n_in % kBlockElems<Block> != 0) return false;
          decode_whole<Block>(row, job.n_in, out);
          return true;
        });
    if (done) return;
    const BlockTraits& t = traits(job.type);
    decode_range<Isa>(job.type, row, job.first, job.n_in, t.elems, t.bytes, out);
  }

  static void multiply_rows(const RowsJob& job, std::int64_t o0, std::int64_t o1, float* scratch) {
    if (job.type == BlockType::kF32) {
      const float* base = reinterpret_cast<const float*>(job.w + o0 * job.row_bytes) + job.first;
      panel(base, job.row_bytes / 4, o1 - o0, job, job.y + o0);
      return;
    }
    if (job.n_tok == 1 && streamed(job, o0, o1)) return;
    const std::int64_t stride = (job.n_in + kLanes - 1) / kLanes * kLanes;
    const std::int64_t at_once = panel_rows(job.n_in);
    for (std::int64_t o = o0; o < o1; o += at_once) {
      const std::int64_t n = o1 - o < at_once ? o1 - o : at_once;
      for (std::int64_t r = 0; r < n; ++r) {
        decode_row(job, job.w + (o + r) * job.row_bytes, scratch + r * stride);
      }
      panel(scratch, stride, n, job, job.y + o);
    }
  }

  static float dot(const float* a, const float* b, std::int64_t n) {
    float y;
    const float* rows[1] = {a};
    tile<1, 1>(rows, b, 0, n, &y, 0);
    return y;
  }

  // Some vectors of y stay in registers over all rows.
  static void add_rows(float* y, const float* p, const float* rows, std::int64_t stride,
                       std::int64_t n_row, std::int64_t n) {
    constexpr int kVectors = 2 * Isa::kRows;
    std::int64_t i = 0;
    for (; i + kVectors * kLanes <= n; i += kVectors * kLanes) {
      V acc[kVectors];
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) acc[c] = Isa::load(y + i + c * kLanes);
      for (std::int64_t s = 0; s < n_row; ++s) {
        const V ps = Isa::set(p[s]);
        const float* row = rows + s * stride + i;
#pragma GCC unroll 8
        for (int c = 0; c < kVectors; ++c)
          acc[c] = Isa::fma(ps, Isa::load(row + c * kLanes), acc[c]);
      }
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) Isa::store(y + i + c * kLanes, acc[c]);
    }
    if (i < n) Loops<Isa>::add_rows(y + i, p, rows + i, stride, n_row, n - i);
  }

  // ---- the delta rule -------------------------------------------------------------------------------------------------

  // Four vectors of columns stay in registers over all keys. Products and additions are not fused: the state is what
  // errors gather in, and its bits are the plain table's.
  static void delta_columns(const DeltaJob& d, std::int64_t j0, std::int64_t j1) {
    constexpr int kVectors = kDeltaBlock / kLanes;
    if (j1 - j0 != kDeltaBlock) return Loops<Isa>::delta_columns(d, j0, j1);
    const std::int64_t n = d.head_dim;
    for (std::int64_t t = 0; t < d.n_tok; ++t) {
      const float *q = d.q + t * d.q_stride, *k = d.k + t * d.k_stride,
                  *v = d.v + t * d.v_stride + j0, *decay = d.decay + t * d.decay_stride;
      V e[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) e[c] = Isa::zero();
      for (std::int64_t i = 0; i < n; ++i) {
        float* row = d.s + i * n + j0;
        const V di = Isa::set(decay[i]), ki = Isa::set(k[i]);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) {
          const V s = Isa::mul(Isa::load(row + c * kLanes), di);
          Isa::store(row + c * kLanes, s);
          e[c] = Isa::add(e[c], Isa::mul(s, ki));
        }
      }
      const V beta = Isa::set(d.beta[t * d.beta_stride]);
      V o[kVectors];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        e[c] = Isa::mul(beta, Isa::sub(Isa::load(v + c * kLanes), e[c]));
        o[c] = Isa::zero();
      }
      for (std::int64_t i = 0; i < n; ++i) {
        float* row = d.s + i * n + j0;
        const V ki = Isa::set(k[i]), qi = Isa::set(q[i] * d.scale);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) {
          const V s = Isa::add(Isa::load(row + c * kLanes), Isa::mul(ki, e[c]));
          Isa::store(row + c * kLanes, s);
          o[c] = Isa::add(o[c], Isa::mul(s, qi));
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) Isa::store(d.o + t * d.o_stride + j0 + c * kLanes, o[c]);
    }
  }
};

template <class Isa>
constexpr KernelTable simd_table(const char* name) {
  using L = Loops<Isa>;
  using S = Simd<Isa>;
  return {name,         S::multiply_rows, S::dot,           L::add_scaled, S::add_rows,
          L::scale_by,  L::sum_squares,   L::sigmoid_gate,  L::situ,       L::exp,
          L::kda_gates, L::conv_silu,     S::delta_columns, L::halves,     L::bf16s};
}

}  // namespace k3::cpu
