// Blocks to vectors of 16 floats in registers, for kernels/cpu/simd.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/codebooks.h"
#include "kernels/cpu/decode_blocks.h"
#include "kernels/cpu/elementary.h"
#include "loader/blocks.h"

namespace k3::cpu {

K3_INLINE __m128i load_bytes(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
// byte >> shift & mask; mask must fit in 8 - shift bits
K3_INLINE __m128i low_bits(__m128i bytes, int shift, int mask) {
  return _mm_and_si128(_mm_srli_epi16(bytes, shift), _mm_set1_epi8(static_cast<char>(mask)));
}
K3_INLINE __m128i look_up(const std::int8_t (&table)[16], __m128i codes) {
  return _mm_shuffle_epi8(load_bytes(table), codes);
}

// ---- blocks in registers ------------------------------------------------------------------------------------------------

// Block types that are decoded in registers, kPiece elements at a time: values(block, piece, v) gives what decode() does.
template <class Isa, class Block>
struct InRegisters;

// Four-bit codes into a table of 16 values: low halves first, then high ones.
template <class Isa>
K3_INLINE void coded_values(const std::uint8_t* q, const std::int8_t (&table)[16], float d,
                            typename Isa::V (&v)[2]) {
  const auto scale = Isa::set(d);
  const __m128i codes = load_bytes(q);
  v[0] = Isa::mul(Isa::from_i8(look_up(table, low_bits(codes, 0, 15))), scale);
  v[1] = Isa::mul(Isa::from_i8(look_up(table, low_bits(codes, 4, 15))), scale);
}

template <class Isa>
struct InRegisters<Isa, BlockQ8_0> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockQ8_0& b, int, typename Isa::V (&v)[2]) {
    const auto d = Isa::set(Isa::half(b.d));
    v[0] = Isa::mul(Isa::from_i8(load_bytes(b.q)), d);
    v[1] = Isa::mul(Isa::from_i8(load_bytes(b.q + 16)), d);
  }
};

template <class Isa>
struct InRegisters<Isa, BlockMXFP4> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockMXFP4& b, int, typename Isa::V (&v)[2]) {
    const std::uint32_t e = b.e;
    coded_values<Isa>(b.q, kMxfp4Values,
                      __builtin_bit_cast(float, e < 2 ? 0x00200000u << e : (e - 1) << 23), v);
  }
};

template <class Isa>
struct InRegisters<Isa, BlockIQ4_NL> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockIQ4_NL& b, int, typename Isa::V (&v)[2]) {
    coded_values<Isa>(b.q, kIq4nlValues, Isa::half(b.d), v);
  }
};

inline constexpr std::int8_t kQ4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                              0,  1,  2,  3,  4,  5,  6,  7};
template <class Isa>
struct InRegisters<Isa, BlockQ4_0> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockQ4_0& b, int, typename Isa::V (&v)[2]) {
    coded_values<Isa>(b.q, kQ4Values, Isa::half(b.d), v);
  }
};

template <class Isa>
struct InRegisters<Isa, BlockIQ4_XS> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockIQ4_XS& b, int g, typename Isa::V (&v)[2]) {
    const int k = (b.sl[g / 2] >> (4 * (g % 2)) & 15) | (b.sh >> (2 * g) & 3) << 4;
    coded_values<Isa>(b.q + 16 * g, kIq4nlValues, Isa::half(b.d) * static_cast<float>(k - 32), v);
  }
};

template <class Isa>
struct InRegisters<Isa, BlockQ4_K> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockQ4_K& b, int g, typename Isa::V (&v)[2]) {
    const ScaleMin sm = scale_min<Isa>(b.s, g);
    const auto scale = Isa::set(Isa::half(b.d) * sm.scale);
    const auto min = Isa::set(Isa::half(b.m) * sm.min);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const __m128i q = low_bits(load_bytes(b.q + 32 * (g / 2) + 16 * k), 4 * (g % 2), 15);
      v[k] = Isa::sub(Isa::mul(scale, Isa::from_i8(q)), min);
    }
  }
};

template <class Isa>
struct InRegisters<Isa, BlockQ2_K> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockQ2_K& b, int g, typename Isa::V (&v)[2]) {
    const float d = Isa::half(b.d), m = Isa::half(b.m);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const int s = b.s[2 * g + k];
      const __m128i q = low_bits(load_bytes(b.q + 32 * (g / 4) + 16 * k), 2 * (g % 4), 3);
      v[k] = Isa::sub(Isa::mul(Isa::set(d * static_cast<float>(s & 15)), Isa::from_i8(q)),
                      Isa::set(m * static_cast<float>(s >> 4)));
    }
  }
};

template <class Isa>
struct InRegisters<Isa, BlockQ6_K> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockQ6_K& b, int g, typename Isa::V (&v)[2]) {
    const int half = g / 4, r = g % 4;
    const float d = Isa::half(b.d);
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const __m128i low =
          low_bits(load_bytes(b.ql + 64 * half + 32 * (r % 2) + 16 * k), 4 * (r / 2), 15);
      const __m128i high = low_bits(load_bytes(b.qh + 32 * half + 16 * k), 2 * r, 3);
      const __m128i q = _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
      v[k] = Isa::mul(Isa::set(d * static_cast<float>(b.s[2 * g + k])), Isa::from_i8(q));
    }
  }
};

template <class Isa>
struct InRegisters<Isa, BlockIQ1_S> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const BlockIQ1_S& b, int g, typename Isa::V (&v)[2]) {
    const std::uint32_t h = b.h[g];
    const auto scale = Isa::set(Isa::half(b.d) * static_cast<float>(2 * (h >> 12 & 7) + 1));
    const auto delta = Isa::set(h >> 15 ? -0.125f : 0.125f);
    const auto octet = [&](int l) __attribute__((always_inline)) {
      return static_cast<long long>(kIq1sGrid[b.q[4 * g + l] | (h >> (3 * l) & 7) << 8]);
    };
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const __m128i grid = _mm_set_epi64x(octet(2 * k + 1), octet(2 * k));
      v[k] = Isa::mul(scale, Isa::add(Isa::from_i8(grid), delta));
    }
  }
};

// The 16-bit floats, as blocks of 32.
struct Block32F16 {
  std::uint16_t h[32];
};
struct Block32BF16 {
  std::uint16_t h[32];
};
template <>
inline constexpr std::int64_t kBlockElems<Block32F16> = 32;
template <>
inline constexpr std::int64_t kBlockElems<Block32BF16> = 32;
template <class Isa>
struct InRegisters<Isa, Block32F16> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const Block32F16& b, int, typename Isa::V (&v)[2]) {
    v[0] = Isa::from_half(b.h);
    v[1] = Isa::from_half(b.h + 16);
  }
};
template <class Isa>
struct InRegisters<Isa, Block32BF16> {
  static constexpr int kPiece = 32;
  K3_INLINE static void values(const Block32BF16& b, int, typename Isa::V (&v)[2]) {
    v[0] = Isa::from_bf16(b.h);
    v[1] = Isa::from_bf16(b.h + 16);
  }
};

// f(a block of the type) where the type is decoded in registers; false where it is not.
template <class F>
K3_INLINE bool with_block(BlockType type, F&& f) {
  switch (type) {
    case BlockType::kQ8_0:
      return f(BlockQ8_0{});
    case BlockType::kMXFP4:
      return f(BlockMXFP4{});
    case BlockType::kQ4_0:
      return f(BlockQ4_0{});
    case BlockType::kIQ4_NL:
      return f(BlockIQ4_NL{});
    case BlockType::kIQ4_XS:
      return f(BlockIQ4_XS{});
    case BlockType::kQ2_K:
      return f(BlockQ2_K{});
    case BlockType::kQ4_K:
      return f(BlockQ4_K{});
    case BlockType::kQ6_K:
      return f(BlockQ6_K{});
    case BlockType::kIQ1_S:
      return f(BlockIQ1_S{});
    case BlockType::kF16:
      return f(Block32F16{});
    case BlockType::kBF16:
      return f(Block32BF16{});
    default:
      return false;
  }
}

}  // namespace k3::cpu
