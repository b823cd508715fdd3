// Matrix-vector products of the fast path, device side: how one token's activations are staged in shared memory and how a
// few lanes of a warp take the dot product of a weight row with them.
//
// Activations are rounded to 15 bits with one scale for 32 neighbours: q = round(16256 x / max|x|), kept as two signed
// bytes, q = 128 hi + lo, so that the integer dot instructions multiply them with 8-bit (Q8_0) and ternary (IQ1_S) weights
// exactly. Relative to the group's largest value the rounding is 2^-15; sums within a group are exact integers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda::gemv {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxLoads = 7;      // weight loads of a lane in flight
constexpr float kLevels = 16256;  // 127 * 128: hi stays within a signed byte

enum class Codec : int { kF32, kQ8, kIq1s };

// A staged vector of n values. hi and lo hold 16 values a granule; even and odd granules lie in two halves, half_bytes
// apart, 64 more than a multiple of 128: lanes that read neighbouring granules, or every other one, meet no bank twice.
struct Staged {
  int n = 0;
  int half_bytes = 0;
  int hi = 0, lo = 0;      // offsets in shared memory, bytes
  int scale = 0, sum = 0;  // f32 per group of 32: scale of q, and sum of the group's values
  int f32 = -1;            // the values themselves, or -1
  bool quantised = false;
};

// Fills `s` for n values and returns the shared memory used so far.
inline int lay_out(Staged& s, int n, bool quantised, bool f32, int at) {
  s.n = n;
  s.quantised = quantised;
  if (quantised) {
    s.half_bytes = (n / 32 * 16 + 127) / 128 * 128 + 64;
    s.hi = at;
    s.lo = s.hi + 2 * s.half_bytes;
    s.scale = s.lo + 2 * s.half_bytes;
    s.sum = s.scale + n / 32 * 4;
    at = (s.sum + n / 32 * 4 + 15) / 16 * 16;
  }
  if (f32) {
    s.f32 = at;
    at += (n + 3) / 4 * 16;
  }
  return at;
}

__device__ __forceinline__ float4 situ4(float4 g, float4 u, Situ p) {
  auto one = [&](float a, float b) {
    const float gate = p.beta * tanhf(a / p.beta) * sigmoid(a);
    return gate * (p.lambda > 0 ? p.lambda * tanhf(b / p.lambda) : b);
  };
  return {one(g.x, u.x), one(g.y, u.y), one(g.z, u.z), one(g.w, u.w)};
}

// Four values of eight neighbouring lanes become a group of 32 in shared memory. All 32 lanes call; i4 may lie past the end.
__device__ __forceinline__ void put4(char* shared, const Staged& s, int i4, float4 v) {
  const bool here = i4 * 4 < s.n;
  if (s.f32 >= 0 && here) *reinterpret_cast<float4*>(shared + s.f32 + i4 * 16) = v;
  if (!s.quantised) return;
  // Bits of |x| order as unsigned numbers do, and those of a NaN come last: a group that holds one gets a NaN for a scale.
  auto bits = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
  unsigned top = max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w)));
#pragma unroll
  for (int o = 1; o < 8; o *= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, o));
  const bool finite = top < 0x7f800000u;
  const float largest = __uint_as_float(top);
  const float inverse = finite && largest > 0x1p-100f ? kLevels / largest : 0.0f;
  const float scale = !finite       ? __uint_as_float(0x7fc00000u)
                      : inverse > 0 ? largest / kLevels
                                    : 0.0f;
  const int q[4] = {__float2int_rn(v.x * inverse), __float2int_rn(v.y * inverse),
                    __float2int_rn(v.z * inverse), __float2int_rn(v.w * inverse)};
  unsigned hi = 0, lo = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int h = (q[j] + 64) >> 7;
    hi |= (static_cast<unsigned>(h) & 255u) << (8 * j);
    lo |= (static_cast<unsigned>(q[j] - h * 128) & 255u) << (8 * j);
  }
  int sum = q[0] + q[1] + q[2] + q[3];
#pragma unroll
  for (int o = 1; o < 8; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (!here) return;
  const int granule = i4 / 4, at = (granule & 1) * s.half_bytes + (granule >> 1) * 16 + i4 % 4 * 4;
  *reinterpret_cast<unsigned*>(shared + s.hi + at) = hi;
  *reinterpret_cast<unsigned*>(shared + s.lo + at) = lo;
  if (i4 % 8 == 0) {
    reinterpret_cast<float*>(shared + s.scale)[i4 / 8] = scale;
    reinterpret_cast<float*>(shared + s.sum)[i4 / 8] = scale * static_cast<float>(sum);
  }
}

__device__ __forceinline__ int4 load_stream(const void* p) {
  int4 v;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_stream8(const void* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];"
      : "=r"(v.x), "=r"(v.y)
      : "l"(p));
  return v;
}
__device__ __forceinline__ float half_at(const std::byte* p) {
  return __half2float(__ldg(reinterpret_cast<const __half*>(p)));
}

// Rows of a matrix as a lane finds its share of them.
struct Rows {
  const std::byte* data = nullptr;
  std::int64_t row_bytes = 0;
  int n_in = 0;
  int scales = 0;  // bytes from the row's begin to its scales
  int d = 0;       // kIq1s: to its block scales
  int first = 0;   // kIq1s: elements of the first 256-block before the band
  Codec codec = Codec::kF32;
};

__device__ __forceinline__ int dot16(const int4& w, const int4& x) {
  return __dp4a(w.w, x.w, __dp4a(w.z, x.z, __dp4a(w.y, x.y, __dp4a(w.x, x.x, 0))));
}

// This lane's part of row . x; lanes sub = 0 .. lanes-1 share the row.
__device__ __forceinline__ float dot_q8(const Rows& m, const std::byte* row, const char* shared,
                                        const Staged& s, int x_granule, int sub, int lanes) {
  const int n = m.n_in / 16;
  float acc = 0;
  for (int g0 = sub; g0 < n; g0 += lanes * kMaxLoads) {
    int4 w[kMaxLoads];
    float d[kMaxLoads];
#pragma unroll
    for (int u = 0; u < kMaxLoads; ++u) {
      const int g = g0 + u * lanes;
      w[u] = g < n ? load_stream(row + g * 16) : int4{};
      d[u] = g < n ? half_at(row + m.scales + g / 2 * 2) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kMaxLoads; ++u) {
      const int g = x_granule + min(g0 + u * lanes, n - 1);
      const int at = (g & 1) * s.half_bytes + (g >> 1) * 16;
      const int4 hi = *reinterpret_cast<const int4*>(shared + s.hi + at);
      const int4 lo = *reinterpret_cast<const int4*>(shared + s.lo + at);
      const int q = dot16(w[u], hi) * 128 + dot16(w[u], lo);
      const float scale = reinterpret_cast<const float*>(shared + s.scale)[g >> 1];
      acc = fmaf(d[u] * scale, static_cast<float>(q), acc);
    }
  }
  return acc;
}

__device__ __forceinline__ int dot_codes(std::uint32_t w, const int4& x, int acc) {
  acc = __dp4a(static_cast<int>(w & 0x03030303u), x.x, acc);
  acc = __dp4a(static_cast<int>(w >> 2 & 0x03030303u), x.y, acc);
  acc = __dp4a(static_cast<int>(w >> 4 & 0x03030303u), x.z, acc);
  return __dp4a(static_cast<int>(w >> 6 & 0x03030303u), x.w, acc);
}

__device__ __forceinline__ float dot_iq1s(const Rows& m, const std::byte* row, const char* shared,
                                          const Staged& s, int x_granule, int sub, int lanes) {
  const int n = m.n_in / 32;
  float acc = 0;
  for (int g0 = sub; g0 < n; g0 += lanes * kMaxLoads) {
    uint2 w[kMaxLoads];
    float d[kMaxLoads];
    unsigned code[kMaxLoads];
#pragma unroll
    for (int u = 0; u < kMaxLoads; ++u) {
      const int g = g0 + u * lanes;
      const bool here = g < n;
      w[u] = here ? load_stream8(row + g * 8) : uint2{};
      code[u] = here ? __ldg(reinterpret_cast<const std::uint8_t*>(row + m.scales + g / 2)) : 0u;
      d[u] = here ? half_at(row + m.d + (m.first / 32 + g) / 8 * 2) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kMaxLoads; ++u) {
      const int own = min(g0 + u * lanes, n - 1), g = x_granule / 2 + own;
      const char* hi = shared + s.hi + g * 16;
      const char* lo = shared + s.lo + g * 16;
      const int4 hi0 = *reinterpret_cast<const int4*>(hi),
                 hi1 = *reinterpret_cast<const int4*>(hi + s.half_bytes);
      const int4 lo0 = *reinterpret_cast<const int4*>(lo),
                 lo1 = *reinterpret_cast<const int4*>(lo + s.half_bytes);
      const int q = dot_codes(w[u].y, hi1, dot_codes(w[u].x, hi0, 0)) * 128 +
                    dot_codes(w[u].y, lo1, dot_codes(w[u].x, lo0, 0));
      const unsigned c = code[u] >> (own % 2 * 4);
      const float scale = d[u] * static_cast<float>(2 * (c & 7) + 1);
      const float delta = c & 8 ? -1.125f : -0.875f;
      const float x_scale = reinterpret_cast<const float*>(shared + s.scale)[g];
      const float x_sum = reinterpret_cast<const float*>(shared + s.sum)[g];
      acc = fmaf(scale, fmaf(delta, x_sum, x_scale * static_cast<float>(q)), acc);
    }
  }
  return acc;
}

__device__ __forceinline__ float dot_f32(const Rows& m, const std::byte* row, const char* shared,
                                         const Staged& s, int sub, int lanes) {
  const int n = m.n_in / 4;
  float acc = 0;
  for (int g0 = sub; g0 < n; g0 += lanes * kMaxLoads) {
    int4 w[kMaxLoads];
#pragma unroll
    for (int u = 0; u < kMaxLoads; ++u) {
      const int g = g0 + u * lanes;
      w[u] = g < n ? load_stream(row + g * 16) : int4{};
    }
#pragma unroll
    for (int u = 0; u < kMaxLoads; ++u) {
      const int g = min(g0 + u * lanes, n - 1);
      const float4 x = *reinterpret_cast<const float4*>(shared + s.f32 + g * 16);
      acc = fmaf(__int_as_float(w[u].x), x.x, acc);
      acc = fmaf(__int_as_float(w[u].y), x.y, acc);
      acc = fmaf(__int_as_float(w[u].z), x.z, acc);
      acc = fmaf(__int_as_float(w[u].w), x.w, acc);
    }
  }
  return acc;
}

// x_granule: where in the staged vector (16 values each) the row's first element meets it; even for kIq1s.
__device__ __forceinline__ float dot_row(const Rows& m, std::int64_t row, const char* shared,
                                         const Staged& s, int x_granule, int sub, int lanes) {
  const std::byte* p = m.data + row * m.row_bytes;
  switch (m.codec) {
    case Codec::kQ8:
      return dot_q8(m, p, shared, s, x_granule, sub, lanes);
    case Codec::kIq1s:
      return dot_iq1s(m, p, shared, s, x_granule, sub, lanes);
    default:
      return dot_f32(m, p, shared, s, sub, lanes);
  }
}

// Sum over the `lanes` lanes that share a row.
__device__ __forceinline__ float sum_lanes(float v, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// ---- host side ----------------------------------------------------------------------------------------------------------

// Multiprocessors of the current device (gemv.cu).
int device_blocks();

inline bool has_codec(const Weight& w) {
  if (w.layout == kPlanes) return true;
  return w.type == BlockType::kF32 && w.n_in % 4 == 0 && w.first % 4 == 0;
}

inline Rows rows_of(const Weight& w) {
  Rows r;
  r.data = w.data;
  r.row_bytes = w.row_bytes;
  r.n_in = static_cast<int>(w.n_in);
  if (w.layout == kPlanes) {
    const PlaneSizes p = plane_sizes(w.type, w.n_in, (w.first + w.n_in + 255) / 256);
    r.scales = static_cast<int>(p.first);
    r.d = static_cast<int>(p.first + p.second);
    r.first = static_cast<int>(w.first);
    r.codec = w.type == BlockType::kQ8_0 ? Codec::kQ8 : Codec::kIq1s;
  } else {
    r.data += w.first * 4;
  }
  return r;
}

// As few lanes a row as keep a lane's loads within kMaxLoads: short rows would leave lanes without work.
inline int lanes_for(const Rows& r) {
  const int loads = r.n_in / (r.codec == Codec::kF32 ? 4 : r.codec == Codec::kQ8 ? 16 : 32);
  int lanes = 4;
  while (lanes < 32 && (loads + lanes - 1) / lanes > kMaxLoads) lanes *= 2;
  return lanes;
}

}  // namespace k3::cuda::gemv
