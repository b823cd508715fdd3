// One decode() per block type, in the order of loader/blocks.h. Loops have fixed trip counts and no branches, so that
// compilers vectorise them. Products of a scale and integers are exact or rounded once (FORMATS.md), so the order of
// the factors is free.
//
// Everything is a template on the instruction set that the including file is compiled for (any type of its own unnamed
// namespace): a function shared by two such files would be compiled for one of them and called by both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codebooks.h"
#include "kernels/half.h"
#include "loader/blocks.h"

namespace k3::cpu {

// ---- 32 elements ------------------------------------------------------------------------------------------------------

template <class Isa>
void decode(const BlockQ4_0& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int j = 0; j < 16; ++j) {
    y[j] = static_cast<float>((b.q[j] & 15) - 8) * d;
    y[j + 16] = static_cast<float>((b.q[j] >> 4) - 8) * d;
  }
}

template <class Isa>
void decode(const BlockQ4_1& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  const float m = half_to_float(b.m);
  for (int j = 0; j < 16; ++j) {
    y[j] = static_cast<float>(b.q[j] & 15) * d + m;
    y[j + 16] = static_cast<float>(b.q[j] >> 4) * d + m;
  }
}

template <class Isa>
std::uint32_t join(const std::uint16_t (&halves)[2]) {
  return halves[0] | static_cast<std::uint32_t>(halves[1]) << 16;
}

template <class Isa>
void decode(const BlockQ5_0& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  const std::uint32_t h = join<Isa>(b.h);
  for (int j = 0; j < 16; ++j) {
    const int low = (b.q[j] & 15) | static_cast<int>((h >> j & 1u) << 4);
    const int high = (b.q[j] >> 4) | static_cast<int>((h >> (j + 16) & 1u) << 4);
    y[j] = static_cast<float>(low - 16) * d;
    y[j + 16] = static_cast<float>(high - 16) * d;
  }
}

template <class Isa>
void decode(const BlockQ5_1& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  const float m = half_to_float(b.m);
  const std::uint32_t h = join<Isa>(b.h);
  for (int j = 0; j < 16; ++j) {
    const int low = (b.q[j] & 15) | static_cast<int>((h >> j & 1u) << 4);
    const int high = (b.q[j] >> 4) | static_cast<int>((h >> (j + 16) & 1u) << 4);
    y[j] = static_cast<float>(low) * d + m;
    y[j + 16] = static_cast<float>(high) * d + m;
  }
}

template <class Isa>
void decode(const BlockQ8_0& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int j = 0; j < 32; ++j) y[j] = static_cast<float>(b.q[j]) * d;
}

template <class Isa>
void decode(const BlockIQ4_NL& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int j = 0; j < 16; ++j) {
    y[j] = static_cast<float>(kIq4nlValues[b.q[j] & 15]) * d;
    y[j + 16] = static_cast<float>(kIq4nlValues[b.q[j] >> 4]) * d;
  }
}

template <class Isa>
void decode(const BlockMXFP4& b, float* __restrict y) {
  // 2^(e-128); e = 0 and 1 are subnormal and have no exponent field to build.
  const std::uint32_t e = b.e;
  const float d = __builtin_bit_cast(float, e < 2 ? 0x00200000u << e : (e - 1) << 23);
  for (int j = 0; j < 16; ++j) {
    y[j] = static_cast<float>(kMxfp4Values[b.q[j] & 15]) * d;
    y[j + 16] = static_cast<float>(kMxfp4Values[b.q[j] >> 4]) * d;
  }
}

// ---- 256 elements: K ----------------------------------------------------------------------------------------------------

template <class Isa>
void decode(const BlockQ2_K& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  const float m = half_to_float(b.m);
  for (int g = 0; g < 16; ++g) {
    const std::uint8_t* q = b.q + 32 * (g / 8) + 16 * (g % 2);
    const int shift = 2 * (g % 8 / 2);
    const float scale = d * static_cast<float>(b.s[g] & 15);
    const float min = m * static_cast<float>(b.s[g] >> 4);
    for (int j = 0; j < 16; ++j) {
      y[16 * g + j] = scale * static_cast<float>(q[j] >> shift & 3) - min;
    }
  }
}

template <class Isa>
void decode(const BlockQ3_K& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 16; ++g) {
    const std::uint8_t* q = b.q + 32 * (g / 8) + 16 * (g % 2);
    const std::uint8_t* h = b.h + 16 * (g % 2);
    const int shift = 2 * (g % 8 / 2);
    const int bit = 4 * (g / 8) + g % 8 / 2;
    const int low = b.s[g % 8] >> (4 * (g / 8)) & 15;
    const int high = b.s[8 + g % 4] >> (2 * (g / 4)) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    for (int j = 0; j < 16; ++j) {
      const int v = (q[j] >> shift & 3) - 4 + 4 * (h[j] >> bit & 1);
      y[16 * g + j] = scale * static_cast<float>(v);
    }
  }
}

struct ScaleMin {
  float scale, min;
};

// The 6-bit scale and minimum of group g, which Q4_K and Q5_K pack alike.
template <class Isa>
ScaleMin scale_min(const std::uint8_t (&s)[12], int g) {
  if (g < 4) return {static_cast<float>(s[g] & 63), static_cast<float>(s[g + 4] & 63)};
  const int scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
  const int min = (s[g + 4] >> 4) | (s[g] >> 6) << 4;
  return {static_cast<float>(scale), static_cast<float>(min)};
}

template <class Isa>
void decode(const BlockQ4_K& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  const float m = half_to_float(b.m);
  for (int g = 0; g < 8; ++g) {
    const ScaleMin sm = scale_min<Isa>(b.s, g);
    const float scale = d * sm.scale;
    const float min = m * sm.min;
    const std::uint8_t* q = b.q + 32 * (g / 2);
    const int shift = 4 * (g % 2);
    for (int j = 0; j < 32; ++j) {
      y[32 * g + j] = scale * static_cast<float>(q[j] >> shift & 15) - min;
    }
  }
}

template <class Isa>
void decode(const BlockQ5_K& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  const float m = half_to_float(b.m);
  for (int g = 0; g < 8; ++g) {
    const ScaleMin sm = scale_min<Isa>(b.s, g);
    const float scale = d * sm.scale;
    const float min = m * sm.min;
    const std::uint8_t* q = b.q + 32 * (g / 2);
    const int shift = 4 * (g % 2);
    for (int j = 0; j < 32; ++j) {
      const int v = (q[j] >> shift & 15) + 16 * (b.h[j] >> g & 1);
      y[32 * g + j] = scale * static_cast<float>(v) - min;
    }
  }
}

template <class Isa>
void decode(const BlockQ6_K& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 16; ++g) {  // 16 elements share a scale; a group of 32 is two of these
    const int half = g / 8;
    const int r = g / 2 % 4;
    const int at = 16 * (g % 2);
    const std::uint8_t* ql = b.ql + 64 * half + 32 * (r % 2) + at;
    const std::uint8_t* qh = b.qh + 32 * half + at;
    const int low_shift = 4 * (r / 2);
    const int high_shift = 2 * r;
    const float scale = d * static_cast<float>(b.s[g]);
    for (int j = 0; j < 16; ++j) {
      const int v = (ql[j] >> low_shift & 15) | (qh[j] >> high_shift & 3) << 4;
      y[16 * g + j] = scale * static_cast<float>(v - 32);
    }
  }
}

// ---- 256 elements: codebooks --------------------------------------------------------------------------------------------

// y[0..8) = scale * (grid + delta), grid bytes signed.
template <class Isa>
void put_octet(float* __restrict y, std::uint64_t grid, float scale, float delta) {
  std::int8_t v[8];
  __builtin_memcpy(v, &grid, sizeof v);
  for (int j = 0; j < 8; ++j) y[j] = scale * (static_cast<float>(v[j]) + delta);
}

// y[0..n) = scale * grid, negated where the mask has a bit; grid bytes unsigned. The sign goes into the float's own bit.
template <class Isa, class Word>
void put_signed(float* __restrict y, Word grid, float scale, std::uint32_t mask) {
  std::uint8_t v[sizeof(Word)];
  __builtin_memcpy(v, &grid, sizeof v);
  for (std::size_t j = 0; j < sizeof(Word); ++j) {
    const std::uint32_t sign = (mask >> j & 1u) << 31;
    y[j] = __builtin_bit_cast(
        float, __builtin_bit_cast(std::uint32_t, scale * static_cast<float>(v[j])) ^ sign);
  }
}

template <class Isa>
void decode(const BlockIQ1_S& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 8; ++g) {
    const std::uint32_t h = b.h[g];
    const float scale = d * static_cast<float>(2 * (h >> 12 & 7) + 1);
    const float delta = h >> 15 ? -0.125f : 0.125f;
    for (int l = 0; l < 4; ++l) {
      const int e = 4 * g + l;
      put_octet<Isa>(y + 8 * e, kIq1sGrid[b.q[e] | (h >> (3 * l) & 7) << 8], scale, delta);
    }
  }
}

template <class Isa>
void decode(const BlockIQ1_M& b, float* __restrict y) {
  const std::uint32_t bits =
      (b.s[0] >> 12) | (b.s[1] >> 12) << 4 | (b.s[2] >> 12) << 8 | (b.s[3] >> 12) << 12;
  const float d = half_to_float(static_cast<std::uint16_t>(bits));
  for (int e = 0; e < 32; ++e) {
    const std::uint32_t h = b.h[e / 2] >> (4 * (e % 2)) & 15u;
    const int k = b.s[e / 8] >> (3 * (e / 2 % 4)) & 7;
    const float delta = h & 8u ? -0.125f : 0.125f;
    put_octet<Isa>(y + 8 * e, kIq1sGrid[b.q[e] | (h & 7u) << 8], d * static_cast<float>(2 * k + 1),
                   delta);
  }
}

template <class Isa>
void decode(const BlockIQ2_XXS& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 8; ++g) {
    const std::uint32_t w = join<Isa>(b.g[g].w);
    const float scale = d * (0.5f + static_cast<float>(w >> 28)) * 0.25f;
    for (int l = 0; l < 4; ++l) {
      put_signed<Isa>(y + 32 * g + 8 * l, kIq2xxsGrid[b.g[g].q[l]], scale,
                      sign_mask(w >> (7 * l) & 127u));
    }
  }
}

// Scale of octet e where a 4-bit number serves two octets (IQ2_XS, IQ2_S).
template <class Isa>
float octet_scale(float d, const std::uint8_t (&s)[8], int e) {
  return d * (0.5f + static_cast<float>(s[e / 4] >> (4 * (e / 2 % 2)) & 15)) * 0.25f;
}

template <class Isa>
void decode(const BlockIQ2_XS& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int e = 0; e < 32; ++e) {
    put_signed<Isa>(y + 8 * e, kIq2xsGrid[b.q[e] & 511u], octet_scale<Isa>(d, b.s, e),
                    sign_mask(b.q[e] >> 9));
  }
}

template <class Isa>
void decode(const BlockIQ2_S& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int e = 0; e < 32; ++e) {
    const std::uint32_t index = b.q[e] | (b.h[e / 4] >> (2 * (e % 4)) & 3u) << 8;
    put_signed<Isa>(y + 8 * e, kIq2sGrid[index], octet_scale<Isa>(d, b.s, e), b.sign[e]);
  }
}

template <class Isa>
void decode(const BlockIQ3_XXS& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 8; ++g) {
    const std::uint32_t w = join<Isa>(b.w[g]);
    const float scale = d * (0.5f + static_cast<float>(w >> 28)) * 0.5f;
    for (int l = 0; l < 4; ++l) {
      const int e = 4 * g + l;
      const std::uint32_t mask = sign_mask(w >> (7 * l) & 127u);
      put_signed<Isa>(y + 8 * e, kIq3xxsGrid[b.q[2 * e]], scale, mask);
      put_signed<Isa>(y + 8 * e + 4, kIq3xxsGrid[b.q[2 * e + 1]], scale, mask >> 4);
    }
  }
}

template <class Isa>
void decode(const BlockIQ3_S& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int e = 0; e < 32; ++e) {
    const int g = e / 4;
    const std::uint32_t h = static_cast<std::uint32_t>(b.h[g]) >> (2 * (e % 4));
    const float scale = d * static_cast<float>(1 + 2 * (b.s[g / 2] >> (4 * (g % 2)) & 15));
    const std::uint32_t mask = b.sign[e];
    put_signed<Isa>(y + 8 * e, kIq3sGrid[b.q[2 * e] | (h & 1u) << 8], scale, mask);
    put_signed<Isa>(y + 8 * e + 4, kIq3sGrid[b.q[2 * e + 1] | (h >> 1 & 1u) << 8], scale,
                    mask >> 4);
  }
}

template <class Isa>
void decode(const BlockIQ4_XS& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 8; ++g) {
    const int k = (b.sl[g / 2] >> (4 * (g % 2)) & 15) | (b.sh >> (2 * g) & 3) << 4;
    const float scale = d * static_cast<float>(k - 32);
    const std::uint8_t* q = b.q + 16 * g;
    for (int j = 0; j < 16; ++j) {
      y[32 * g + j] = scale * static_cast<float>(kIq4nlValues[q[j] & 15]);
      y[32 * g + j + 16] = scale * static_cast<float>(kIq4nlValues[q[j] >> 4]);
    }
  }
}

// ---- 256 elements: ternary ----------------------------------------------------------------------------------------------

// Digit k of n bytes that each hold base-3 digits as a fraction of 256.
template <class Isa>
void put_digit(float* __restrict y, const std::uint8_t* bytes, int n, int power, float d) {
  for (int j = 0; j < n; ++j) {
    const int digit = (bytes[j] * power & 255) * 3 >> 8;
    y[j] = static_cast<float>(digit - 1) * d;
  }
}

template <class Isa>
void decode(const BlockTQ1_0& b, float* __restrict y) {
  constexpr int kPowers[5] = {1, 3, 9, 27, 81};
  const float d = half_to_float(b.d);
  for (int k = 0; k < 5; ++k) put_digit<Isa>(y + 32 * k, b.q, 32, kPowers[k], d);
  for (int k = 0; k < 5; ++k) put_digit<Isa>(y + 160 + 16 * k, b.q + 32, 16, kPowers[k], d);
  for (int k = 0; k < 4; ++k) put_digit<Isa>(y + 240 + 4 * k, b.h, 4, kPowers[k], d);
}

template <class Isa>
void decode(const BlockTQ2_0& b, float* __restrict y) {
  const float d = half_to_float(b.d);
  for (int g = 0; g < 8; ++g) {
    const std::uint8_t* q = b.q + 32 * (g / 4);
    const int shift = 2 * (g % 4);
    for (int j = 0; j < 32; ++j) {
      y[32 * g + j] = static_cast<float>((q[j] >> shift & 3) - 1) * d;
    }
  }
}

// ---- any number of blocks -----------------------------------------------------------------------------------------------

// ---- any number of blocks -----------------------------------------------------------------------------------------------

template <class Block>
inline constexpr std::int64_t kBlockElems = 256;
template <>
inline constexpr std::int64_t kBlockElems<BlockQ4_0> = 32;
template <>
inline constexpr std::int64_t kBlockElems<BlockQ4_1> = 32;
template <>
inline constexpr std::int64_t kBlockElems<BlockQ5_0> = 32;
template <>
inline constexpr std::int64_t kBlockElems<BlockQ5_1> = 32;
template <>
inline constexpr std::int64_t kBlockElems<BlockQ8_0> = 32;
template <>
inline constexpr std::int64_t kBlockElems<BlockIQ4_NL> = 32;
template <>
inline constexpr std::int64_t kBlockElems<BlockMXFP4> = 32;

template <class Isa, class Block>
void decode_all(const std::byte* bytes, float* out, std::int64_t n_elem) {
  constexpr std::int64_t elems = kBlockElems<Block>;
  const Block* blocks = reinterpret_cast<const Block*>(bytes);
  for (std::int64_t i = 0; i < n_elem / elems; ++i) decode<Isa>(blocks[i], out + i * elems);
}

template <class Isa>
void half_all(const std::byte* bytes, float* out, std::int64_t n_elem) {
  const std::uint16_t* values = reinterpret_cast<const std::uint16_t*>(bytes);
  for (std::int64_t i = 0; i < n_elem; ++i) out[i] = half_to_float(values[i]);
}

template <class Isa>
void bf16_all(const std::byte* bytes, float* out, std::int64_t n_elem) {
  const std::uint16_t* values = reinterpret_cast<const std::uint16_t*>(bytes);
  for (std::int64_t i = 0; i < n_elem; ++i) out[i] = bf16_to_float(values[i]);
}

// n elements of whole blocks.
template <class Isa>
void decode_blocks(BlockType type, const std::byte* in, float* out, std::int64_t n) {
  switch (type) {
    case BlockType::kF32:
      __builtin_memcpy(out, in, static_cast<std::size_t>(n) * sizeof(float));
      return;
    case BlockType::kF16:
      return half_all<Isa>(in, out, n);
    case BlockType::kBF16:
      return bf16_all<Isa>(in, out, n);
    case BlockType::kQ4_0:
      return decode_all<Isa, BlockQ4_0>(in, out, n);
    case BlockType::kQ4_1:
      return decode_all<Isa, BlockQ4_1>(in, out, n);
    case BlockType::kQ5_0:
      return decode_all<Isa, BlockQ5_0>(in, out, n);
    case BlockType::kQ5_1:
      return decode_all<Isa, BlockQ5_1>(in, out, n);
    case BlockType::kQ8_0:
      return decode_all<Isa, BlockQ8_0>(in, out, n);
    case BlockType::kQ2_K:
      return decode_all<Isa, BlockQ2_K>(in, out, n);
    case BlockType::kQ3_K:
      return decode_all<Isa, BlockQ3_K>(in, out, n);
    case BlockType::kQ4_K:
      return decode_all<Isa, BlockQ4_K>(in, out, n);
    case BlockType::kQ5_K:
      return decode_all<Isa, BlockQ5_K>(in, out, n);
    case BlockType::kQ6_K:
      return decode_all<Isa, BlockQ6_K>(in, out, n);
    case BlockType::kIQ2_XXS:
      return decode_all<Isa, BlockIQ2_XXS>(in, out, n);
    case BlockType::kIQ2_XS:
      return decode_all<Isa, BlockIQ2_XS>(in, out, n);
    case BlockType::kIQ3_XXS:
      return decode_all<Isa, BlockIQ3_XXS>(in, out, n);
    case BlockType::kIQ1_S:
      return decode_all<Isa, BlockIQ1_S>(in, out, n);
    case BlockType::kIQ4_NL:
      return decode_all<Isa, BlockIQ4_NL>(in, out, n);
    case BlockType::kIQ3_S:
      return decode_all<Isa, BlockIQ3_S>(in, out, n);
    case BlockType::kIQ2_S:
      return decode_all<Isa, BlockIQ2_S>(in, out, n);
    case BlockType::kIQ4_XS:
      return decode_all<Isa, BlockIQ4_XS>(in, out, n);
    case BlockType::kIQ1_M:
      return decode_all<Isa, BlockIQ1_M>(in, out, n);
    case BlockType::kTQ1_0:
      return decode_all<Isa, BlockTQ1_0>(in, out, n);
    case BlockType::kTQ2_0:
      return decode_all<Isa, BlockTQ2_0>(in, out, n);
    case BlockType::kMXFP4:
      return decode_all<Isa, BlockMXFP4>(in, out, n);
  }
}

// Elements [first, first + n) of a row, at any place in any block; blocks outside the range are not read.
template <class Isa>
void decode_range(BlockType type, const std::byte* row, std::int64_t first, std::int64_t n,
                  std::int64_t block_elems, std::int64_t block_bytes, float* out) {
  constexpr std::int64_t kMaxElems = 256;
  const std::byte* block = row + first / block_elems * block_bytes;
  // A block that the range enters or leaves inside is decoded whole, aside.
  const auto partial = [&](std::int64_t skip, std::int64_t take) {
    float whole[kMaxElems];
    decode_blocks<Isa>(type, block, whole, block_elems);
    for (std::int64_t i = 0; i < take; ++i) out[i] = whole[skip + i];
    block += block_bytes;
    out += take;
    n -= take;
  };
  const std::int64_t skip = first % block_elems;
  if (skip != 0) partial(skip, n < block_elems - skip ? n : block_elems - skip);
  const std::int64_t whole = n / block_elems * block_elems;
  if (whole > 0) {
    decode_blocks<Isa>(type, block, out, whole);
    block += whole / block_elems * block_bytes;
    out += whole;
    n -= whole;
  }
  if (n > 0) partial(0, n);
}

}  // namespace k3::cpu
