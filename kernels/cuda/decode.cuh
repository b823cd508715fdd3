// Eight consecutive weights ("octet") of any block type to float32, on the device, from the bytes as the file has them.
// The same products in the same order as kernels/cpu/dequant.cpp: bit-exact, tested together with it. An octet never
// crosses a scale group, in any type.
#pragma once

#include <cstdint>

#include "kernels/codebooks.h"
#include "loader/blocks.h"

namespace k3::cuda {

template <std::size_t N>
struct Table16 {
  std::uint16_t v[N];
};

template <std::size_t N>
constexpr Table16<N> table16(const std::uint16_t (&from)[N]) {
  Table16<N> t{};
  for (std::size_t i = 0; i < N; ++i) t.v[i] = from[i];
  return t;
}

// Codebooks as stored: 2 bits a value (3 in the IQ3 types).
static __device__ const Table16<2048> d_iq1s = table16(kIq1sPacked);
static __device__ const Table16<256> d_iq2xxs = table16(kIq2xxsPacked);
static __device__ const Table16<512> d_iq2xs = table16(kIq2xsPacked);
static __device__ const Table16<1024> d_iq2s = table16(kIq2sPacked);
static __device__ const Table16<256> d_iq3xxs = table16(kIq3xxsPacked);
static __device__ const Table16<512> d_iq3s = table16(kIq3sPacked);

// Products and sums as written, never contracted: the affine types must give the CPU's bits.
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }

__device__ __forceinline__ float half_value(std::uint16_t h) {
  const std::uint32_t rest = h & 0x7fffu;
  const float scaled = mul(__uint_as_float(rest << 13), 0x1p112f);
  const std::uint32_t special = rest >= 0x7c00u ? 0x7f800000u : 0u;
  return __uint_as_float(__float_as_uint(scaled) | special |
                         static_cast<std::uint32_t>(h & 0x8000u) << 16);
}

__device__ __forceinline__ std::uint32_t join(const std::uint16_t (&h)[2]) {
  return h[0] | static_cast<std::uint32_t>(h[1]) << 16;
}

// Value j of an IQ4_NL code, of an MXFP4 code: arithmetic on a packed constant instead of a table in memory.
__device__ __forceinline__ float iq4nl(std::uint32_t code) {
  constexpr std::uint64_t kLow = 0xf6eaddcfbfad9881ull, kHigh = 0x7159453526190d01ull;
  const std::uint64_t word = code < 8 ? kLow : kHigh;
  return static_cast<float>(static_cast<std::int8_t>(word >> (8 * (code & 7))));
}
__device__ __forceinline__ float mxfp4(std::uint32_t code) {
  constexpr std::uint64_t kMagnitude = 0x0c08060403020100ull;
  const int m = static_cast<std::uint8_t>(kMagnitude >> (8 * (code & 7)));
  return static_cast<float>(code & 8 ? -m : m);  // an integer, so that both zeros are +0
}

// ---- blocks of 32: octet o of 4; nibbles are halves, not neighbours ---------------------------------------------------

__device__ __forceinline__ std::uint32_t nibble(const std::uint8_t* q, int o, int j) {
  const std::uint8_t byte = q[8 * (o & 1) + j];
  return o < 2 ? byte & 15u : byte >> 4;
}

__device__ __forceinline__ void octet(const BlockQ4_0& b, int o, float* y) {
  const float d = half_value(b.d);
  for (int j = 0; j < 8; ++j)
    y[j] = mul(static_cast<float>(static_cast<int>(nibble(b.q, o, j)) - 8), d);
}
__device__ __forceinline__ void octet(const BlockQ4_1& b, int o, float* y) {
  const float d = half_value(b.d), m = half_value(b.m);
  for (int j = 0; j < 8; ++j) y[j] = add(mul(static_cast<float>(nibble(b.q, o, j)), d), m);
}
__device__ __forceinline__ void octet(const BlockQ5_0& b, int o, float* y) {
  const float d = half_value(b.d);
  const std::uint32_t h = join(b.h) >> (8 * o);
  for (int j = 0; j < 8; ++j) {
    const auto v = static_cast<int>(nibble(b.q, o, j) | (h >> j & 1u) << 4);
    y[j] = mul(static_cast<float>(v - 16), d);
  }
}
__device__ __forceinline__ void octet(const BlockQ5_1& b, int o, float* y) {
  const float d = half_value(b.d), m = half_value(b.m);
  const std::uint32_t h = join(b.h) >> (8 * o);
  for (int j = 0; j < 8; ++j) {
    y[j] = add(mul(static_cast<float>(nibble(b.q, o, j) | (h >> j & 1u) << 4), d), m);
  }
}
__device__ __forceinline__ void octet(const BlockQ8_0& b, int o, float* y) {
  const float d = half_value(b.d);
  for (int j = 0; j < 8; ++j) y[j] = mul(static_cast<float>(b.q[8 * o + j]), d);
}
__device__ __forceinline__ void octet(const BlockIQ4_NL& b, int o, float* y) {
  const float d = half_value(b.d);
  for (int j = 0; j < 8; ++j) y[j] = mul(iq4nl(nibble(b.q, o, j)), d);
}
__device__ __forceinline__ void octet(const BlockMXFP4& b, int o, float* y) {
  const std::uint32_t e = b.e;
  const float d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  for (int j = 0; j < 8; ++j) y[j] = mul(mxfp4(nibble(b.q, o, j)), d);
}

// ---- blocks of 256: octet o of 32 --------------------------------------------------------------------------------------

__device__ __forceinline__ void octet(const BlockQ2_K& b, int o, float* y) {
  const int g = o / 2, shift = 2 * (g % 8 / 2);
  const std::uint8_t* q = b.q + 32 * (g / 8) + 16 * (g % 2) + 8 * (o % 2);
  const float scale = mul(half_value(b.d), static_cast<float>(b.s[g] & 15));
  const float min = mul(half_value(b.m), static_cast<float>(b.s[g] >> 4));
  for (int j = 0; j < 8; ++j) y[j] = add(mul(scale, static_cast<float>(q[j] >> shift & 3)), -min);
}
__device__ __forceinline__ void octet(const BlockQ3_K& b, int o, float* y) {
  const int g = o / 2, at = 16 * (g % 2) + 8 * (o % 2);
  const std::uint8_t* q = b.q + 32 * (g / 8) + at;
  const std::uint8_t* h = b.h + at;
  const int shift = 2 * (g % 8 / 2), bit = 4 * (g / 8) + g % 8 / 2;
  const int low = b.s[g % 8] >> (4 * (g / 8)) & 15, high = b.s[8 + g % 4] >> (2 * (g / 4)) & 3;
  const float scale = mul(half_value(b.d), static_cast<float>((low | high << 4) - 32));
  for (int j = 0; j < 8; ++j) {
    y[j] = mul(scale, static_cast<float>((q[j] >> shift & 3) - 4 + 4 * (h[j] >> bit & 1)));
  }
}

// The 6-bit scale and minimum of group g, which Q4_K and Q5_K pack alike.
struct ScaleMin {
  float scale, min;
};
__device__ __forceinline__ ScaleMin scale_min(const std::uint8_t (&s)[12], int g) {
  if (g < 4) return {static_cast<float>(s[g] & 63), static_cast<float>(s[g + 4] & 63)};
  return {static_cast<float>((s[g + 4] & 15) | (s[g - 4] >> 6) << 4),
          static_cast<float>((s[g + 4] >> 4) | (s[g] >> 6) << 4)};
}

__device__ __forceinline__ void octet(const BlockQ4_K& b, int o, float* y) {
  const int g = o / 4, shift = 4 * (g % 2);
  const ScaleMin sm = scale_min(b.s, g);
  const float scale = mul(half_value(b.d), sm.scale), min = mul(half_value(b.m), sm.min);
  const std::uint8_t* q = b.q + 32 * (g / 2) + 8 * (o % 4);
  for (int j = 0; j < 8; ++j) y[j] = add(mul(scale, static_cast<float>(q[j] >> shift & 15)), -min);
}
__device__ __forceinline__ void octet(const BlockQ5_K& b, int o, float* y) {
  const int g = o / 4, shift = 4 * (g % 2), at = 8 * (o % 4);
  const ScaleMin sm = scale_min(b.s, g);
  const float scale = mul(half_value(b.d), sm.scale), min = mul(half_value(b.m), sm.min);
  const std::uint8_t* q = b.q + 32 * (g / 2) + at;
  for (int j = 0; j < 8; ++j) {
    const int v = (q[j] >> shift & 15) + 16 * (b.h[at + j] >> g & 1);
    y[j] = add(mul(scale, static_cast<float>(v)), -min);
  }
}
__device__ __forceinline__ void octet(const BlockQ6_K& b, int o, float* y) {
  const int g = o / 2, half = g / 8, r = g / 2 % 4, at = 16 * (g % 2) + 8 * (o % 2);
  const std::uint8_t* ql = b.ql + 64 * half + 32 * (r % 2) + at;
  const std::uint8_t* qh = b.qh + 32 * half + at;
  const float scale = mul(half_value(b.d), static_cast<float>(b.s[g]));
  for (int j = 0; j < 8; ++j) {
    const int v = (ql[j] >> (4 * (r / 2)) & 15) | (qh[j] >> (2 * r) & 3) << 4;
    y[j] = mul(scale, static_cast<float>(v - 32));
  }
}

// Value j of a packed IQ1 grid entry: -1, 0, 1.
__device__ __forceinline__ float iq1_value(std::uint32_t packed, int j) {
  return static_cast<float>(static_cast<int>(packed >> (2 * j) & 3u) - 1);
}
// Of an IQ2 entry: 8, 25, 43.
__device__ __forceinline__ float iq2_value(std::uint32_t packed, int j) {
  return static_cast<float>(0x002b1908u >> (8 * (packed >> (2 * j) & 3u)) & 255u);
}
__device__ __forceinline__ float signed_value(float v, std::uint32_t mask, int j) {
  return __uint_as_float(__float_as_uint(v) ^ (mask >> j & 1u) << 31);
}
__device__ __forceinline__ std::uint32_t sign_bits(std::uint32_t stored) {
  return stored | (__popc(stored) & 1u) << 7;
}

__device__ __forceinline__ void octet(const BlockIQ1_S& b, int o, float* y) {
  const std::uint32_t h = b.h[o / 4];
  const float scale = mul(half_value(b.d), static_cast<float>(2 * (h >> 12 & 7) + 1));
  const float delta = h >> 15 ? -0.125f : 0.125f;
  const std::uint32_t grid = d_iq1s.v[b.q[o] | (h >> (3 * (o % 4)) & 7) << 8];
  for (int j = 0; j < 8; ++j) y[j] = mul(scale, iq1_value(grid, j) + delta);
}
__device__ __forceinline__ void octet(const BlockIQ1_M& b, int o, float* y) {
  const std::uint32_t bits =
      (b.s[0] >> 12) | (b.s[1] >> 12) << 4 | (b.s[2] >> 12) << 8 | (b.s[3] >> 12) << 12;
  const std::uint32_t h = b.h[o / 2] >> (4 * (o % 2)) & 15u;
  const int k = b.s[o / 8] >> (3 * (o / 2 % 4)) & 7;
  const float scale =
      mul(half_value(static_cast<std::uint16_t>(bits)), static_cast<float>(2 * k + 1));
  const float delta = h & 8u ? -0.125f : 0.125f;
  const std::uint32_t grid = d_iq1s.v[b.q[o] | (h & 7u) << 8];
  for (int j = 0; j < 8; ++j) y[j] = mul(scale, iq1_value(grid, j) + delta);
}
__device__ __forceinline__ void octet(const BlockIQ2_XXS& b, int o, float* y) {
  const BlockIQ2_XXS::Group& g = b.g[o / 4];
  const std::uint32_t w = join(g.w);
  const float scale = mul(mul(half_value(b.d), 0.5f + static_cast<float>(w >> 28)), 0.25f);
  const std::uint32_t grid = d_iq2xxs.v[g.q[o % 4]], mask = sign_bits(w >> (7 * (o % 4)) & 127u);
  for (int j = 0; j < 8; ++j) y[j] = signed_value(mul(scale, iq2_value(grid, j)), mask, j);
}
// Scale of octet o where a 4-bit number serves two octets.
__device__ __forceinline__ float octet_scale(std::uint16_t d, const std::uint8_t (&s)[8], int o) {
  return mul(mul(half_value(d), 0.5f + static_cast<float>(s[o / 4] >> (4 * (o / 2 % 2)) & 15)),
             0.25f);
}
__device__ __forceinline__ void octet(const BlockIQ2_XS& b, int o, float* y) {
  const float scale = octet_scale(b.d, b.s, o);
  const std::uint32_t grid = d_iq2xs.v[b.q[o] & 511u], mask = sign_bits(b.q[o] >> 9);
  for (int j = 0; j < 8; ++j) y[j] = signed_value(mul(scale, iq2_value(grid, j)), mask, j);
}
__device__ __forceinline__ void octet(const BlockIQ2_S& b, int o, float* y) {
  const float scale = octet_scale(b.d, b.s, o);
  const std::uint32_t grid = d_iq2s.v[b.q[o] | (b.h[o / 4] >> (2 * (o % 4)) & 3u) << 8];
  for (int j = 0; j < 8; ++j) y[j] = signed_value(mul(scale, iq2_value(grid, j)), b.sign[o], j);
}
__device__ __forceinline__ void octet(const BlockIQ3_XXS& b, int o, float* y) {
  const std::uint32_t w = join(b.w[o / 4]);
  const float scale = mul(mul(half_value(b.d), 0.5f + static_cast<float>(w >> 28)), 0.5f);
  const std::uint32_t mask = sign_bits(w >> (7 * (o % 4)) & 127u);
  for (int j = 0; j < 8; ++j) {
    const std::uint32_t level = d_iq3xxs.v[b.q[2 * o + j / 4]] >> (3 * (j % 4)) & 7u;
    const std::uint32_t value = level == 7 ? 62u : 4u + 8u * level;
    y[j] = signed_value(mul(scale, static_cast<float>(value)), mask, j);
  }
}
__device__ __forceinline__ void octet(const BlockIQ3_S& b, int o, float* y) {
  const int g = o / 4;
  const std::uint32_t h = static_cast<std::uint32_t>(b.h[g]) >> (2 * (o % 4));
  const float scale =
      mul(half_value(b.d), static_cast<float>(1 + 2 * (b.s[g / 2] >> (4 * (g % 2)) & 15)));
  for (int j = 0; j < 8; ++j) {
    const std::uint32_t index = b.q[2 * o + j / 4] | (h >> (j / 4) & 1u) << 8;
    const std::uint32_t level = d_iq3s.v[index] >> (3 * (j % 4)) & 7u;
    y[j] = signed_value(mul(scale, static_cast<float>(2 * level + 1)), b.sign[o], j);
  }
}
__device__ __forceinline__ void octet(const BlockIQ4_XS& b, int o, float* y) {
  const int g = o / 4;
  const int k = (b.sl[g / 2] >> (4 * (g % 2)) & 15) | (b.sh >> (2 * g) & 3) << 4;
  const float scale = mul(half_value(b.d), static_cast<float>(k - 32));
  for (int j = 0; j < 8; ++j) y[j] = mul(scale, iq4nl(nibble(b.q + 16 * g, o % 4, j)));
}
__device__ __forceinline__ void octet(const BlockTQ1_0& b, int o, float* y) {
  const float d = half_value(b.d);
  for (int j = 0; j < 8; ++j) {
    const int i = 8 * o + j;
    int byte, digit;
    if (i < 160) {
      byte = b.q[i % 32];
      digit = i / 32;
    } else if (i < 240) {
      byte = b.q[32 + i % 16];
      digit = (i - 160) / 16;
    } else {
      byte = b.h[i % 4];
      digit = (i - 240) / 4;
    }
    int power = 1;
    for (int k = 0; k < digit; ++k) power *= 3;
    y[j] = mul(static_cast<float>(((byte * power & 255) * 3 >> 8) - 1), d);
  }
}
__device__ __forceinline__ void octet(const BlockTQ2_0& b, int o, float* y) {
  const float d = half_value(b.d);
  const int g = o / 4;
  const std::uint8_t* q = b.q + 32 * (g / 4) + 8 * (o % 4);
  for (int j = 0; j < 8; ++j) y[j] = mul(static_cast<float>((q[j] >> (2 * (g % 4)) & 3) - 1), d);
}

// ---- by type ---------------------------------------------------------------------------------------------------------------

template <BlockType T>
struct BlockOf;  // the block struct, and how many elements it has
#define K3_BLOCK(NAME, ELEMS)            \
  template <>                            \
  struct BlockOf<BlockType::k##NAME> {   \
    using type = Block##NAME;            \
    static constexpr int kElems = ELEMS; \
  };
K3_BLOCK(Q4_0, 32)
K3_BLOCK(Q4_1, 32)
K3_BLOCK(Q5_0, 32)
K3_BLOCK(Q5_1, 32)
K3_BLOCK(Q8_0, 32)
K3_BLOCK(IQ4_NL, 32)
K3_BLOCK(MXFP4, 32)
K3_BLOCK(Q2_K, 256)
K3_BLOCK(Q3_K, 256)
K3_BLOCK(Q4_K, 256)
K3_BLOCK(Q5_K, 256)
K3_BLOCK(Q6_K, 256)
K3_BLOCK(IQ2_XXS, 256)
K3_BLOCK(IQ2_XS, 256)
K3_BLOCK(IQ2_S, 256)
K3_BLOCK(IQ3_XXS, 256)
K3_BLOCK(IQ3_S, 256)
K3_BLOCK(IQ1_S, 256)
K3_BLOCK(IQ1_M, 256)
K3_BLOCK(IQ4_XS, 256)
K3_BLOCK(TQ1_0, 256)
K3_BLOCK(TQ2_0, 256)
#undef K3_BLOCK

// Elements [e, e + 8) of a row that starts at `row`; e a multiple of 8 for block types. Plain floats: any e.
template <BlockType T>
__device__ __forceinline__ void decode8(const std::byte* row, std::int64_t e, float* y) {
  if constexpr (T == BlockType::kF32) {
    const auto* p = reinterpret_cast<const float*>(row) + e;
    for (int j = 0; j < 8; ++j) y[j] = p[j];
  } else if constexpr (T == BlockType::kF16) {
    const auto* p = reinterpret_cast<const std::uint16_t*>(row) + e;
    for (int j = 0; j < 8; ++j) y[j] = half_value(p[j]);
  } else if constexpr (T == BlockType::kBF16) {
    const auto* p = reinterpret_cast<const std::uint16_t*>(row) + e;
    for (int j = 0; j < 8; ++j) y[j] = __uint_as_float(static_cast<std::uint32_t>(p[j]) << 16);
  } else {
    using B = typename BlockOf<T>::type;
    constexpr int kElems = BlockOf<T>::kElems;
    octet(reinterpret_cast<const B*>(row)[e / kElems], static_cast<int>(e % kElems) / 8, y);
  }
}

// One element: the end of a row of plain floats that is no multiple of 8.
template <BlockType T>
__device__ __forceinline__ float decode1(const std::byte* row, std::int64_t e) {
  if constexpr (T == BlockType::kF32) {
    return reinterpret_cast<const float*>(row)[e];
  } else if constexpr (T == BlockType::kF16) {
    return half_value(reinterpret_cast<const std::uint16_t*>(row)[e]);
  } else if constexpr (T == BlockType::kBF16) {
    return __uint_as_float(
        static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(row)[e]) << 16);
  } else {
    float y[8];
    decode8<T>(row, e / 8 * 8, y);
    return y[e % 8];
  }
}

// Calls f.template operator()<T>() for the type of a weight.
template <class F>
void with_type(BlockType type, const F& f) {
  switch (type) {
#define K3_TYPE(NAME)      \
  case BlockType::k##NAME: \
    return f.template operator()<BlockType::k##NAME>();
    K3_TYPE(F32)
    K3_TYPE(F16)
    K3_TYPE(BF16)
    K3_TYPE(Q4_0)
    K3_TYPE(Q4_1)
    K3_TYPE(Q5_0)
    K3_TYPE(Q5_1)
    K3_TYPE(Q8_0)
    K3_TYPE(Q2_K)
    K3_TYPE(Q3_K)
    K3_TYPE(Q4_K)
    K3_TYPE(Q5_K)
    K3_TYPE(Q6_K)
    K3_TYPE(IQ2_XXS)
    K3_TYPE(IQ2_XS)
    K3_TYPE(IQ3_XXS)
    K3_TYPE(IQ1_S)
    K3_TYPE(IQ4_NL)
    K3_TYPE(IQ3_S)
    K3_TYPE(IQ2_S)
    K3_TYPE(IQ4_XS)
    K3_TYPE(IQ1_M)
    K3_TYPE(TQ1_0)
    K3_TYPE(TQ2_0)
    K3_TYPE(MXFP4)
#undef K3_TYPE
  }
}

}  // namespace k3::cuda
