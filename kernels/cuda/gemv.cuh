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

// A unit of work: pieces of 16 bytes of a row, in shared memory, `lanes` apart; this lane's are from `sub` on. They meet the
// staged vector at piece `x_piece`. This lane's part of row . x.
__device__ __forceinline__ float unit_q8(const char* codes, const char* scales, int n,
                                         const char* shared, const Staged& s, int x_piece, int sub,
                                         int lanes) {
  float acc = 0;
#pragma unroll 4
  for (int p = sub; p < n; p += lanes) {
    const int4 w = *reinterpret_cast<const int4*>(codes + p * 16);
    const float d = __half2float(*reinterpret_cast<const __half*>(scales + p / 2 * 2));
    const int g = x_piece + p, at = (g & 1) * s.half_bytes + (g >> 1) * 16;
    const int4 hi = *reinterpret_cast<const int4*>(shared + s.hi + at);
    const int4 lo = *reinterpret_cast<const int4*>(shared + s.lo + at);
    const int q = dot16(w, hi) * 128 + dot16(w, lo);
    const float scale = reinterpret_cast<const float*>(shared + s.scale)[g >> 1];
    acc = fmaf(d * scale, static_cast<float>(q), acc);
  }
  return acc;
}

__device__ __forceinline__ float unit_f32(const char* values, int n, const char* shared,
                                          const Staged& s, int x_piece, int sub, int lanes) {
  float acc = 0;
#pragma unroll 4
  for (int p = sub; p < n; p += lanes) {
    const float4 w = *reinterpret_cast<const float4*>(values + p * 16);
    const float4 x = *reinterpret_cast<const float4*>(shared + s.f32 + (x_piece + p) * 16);
    acc = fmaf(w.x, x.x, fmaf(w.y, x.y, fmaf(w.z, x.z, fmaf(w.w, x.w, acc))));
  }
  return acc;
}

// ---- IQ1_S: tiles of 16 rows on the tensor cores --------------------------------------------------------------------------
// A piece is 128 weights of a row, four groups; a tile takes the piece of 16 rows. In the multiply-accumulate of 16 rows, 8
// columns and 32 inner places, lane 4 r + t holds places of rows r and r + 8. Which weights those are is free as long as the
// other operand agrees: here the lane holds group t, in four instructions of 8 weights each. The other operand's columns
// 2 t and 2 t + 1 are hi and lo of group t, and zero at the places of other groups, so that the products of four groups
// stay apart and lane 4 r + t gets both of its own group's.

struct Iq1sGroup {
  uint2 codes;
  unsigned scale;  // the piece's four nibbles
  float d;
};

// row: in shared memory.
__device__ __forceinline__ Iq1sGroup load_group(const Rows& m, const char* row, int piece, int t) {
  Iq1sGroup g;
  g.codes = *reinterpret_cast<const uint2*>(row + piece * 32 + t * 8);
  g.scale = *reinterpret_cast<const std::uint16_t*>(row + m.scales + piece * 2);
  g.d = __half2float(*reinterpret_cast<const __half*>(row + m.d + (m.first / 128 + piece) / 2 * 2));
  return g;
}

__device__ __forceinline__ void multiply(int (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                         unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// What group t of a row adds: q = hi * 128 + lo of its codes with the activations.
__device__ __forceinline__ float group_part(const Iq1sGroup& g, int t, int hi, int lo,
                                            float x_scale, float x_sum) {
  const unsigned c = g.scale >> (4 * t);
  const float scale = g.d * static_cast<float>(2 * (c & 7) + 1);
  const float delta = c & 8 ? -1.125f : -0.875f;
  return scale * fmaf(delta, x_sum, x_scale * static_cast<float>(hi * 128 + lo));
}

// Pieces [begin, end) of a tile in shared memory, which meets the staged vector at group x_group: acc[0] and acc[1] are this
// lane's parts of rows r and r + 8, to be summed over t. row[i]: where those rows lie.
__device__ __forceinline__ void add_tile(const Rows& m, const char* const (&row)[2],
                                         const char* shared, const Staged& s, int x_group,
                                         int begin, int end, float (&acc)[2]) {
  const int lane = threadIdx.x % 32, t = lane % 4, r = lane / 4;
  const char* plane = shared + (r % 2 == 0 ? s.hi : s.lo);
#pragma unroll 2
  for (int p = begin; p < end; ++p) {
    const Iq1sGroup first = load_group(m, row[0], p, t), second = load_group(m, row[1], p, t);
    const int own = x_group + 4 * p + t;
    int4 even{}, odd{};
    if (r / 2 == t) {
      even = *reinterpret_cast<const int4*>(plane + own * 16);
      odd = *reinterpret_cast<const int4*>(plane + own * 16 + s.half_bytes);
    }
    const float x_scale = reinterpret_cast<const float*>(shared + s.scale)[own];
    const float x_sum = reinterpret_cast<const float*>(shared + s.sum)[own];
    const uint2 a = first.codes, b = second.codes;
    constexpr unsigned kMask = 0x03030303u;
    int c[4] = {};
    multiply(c, a.x & kMask, b.x & kMask, a.y & kMask, b.y & kMask, even.x, odd.x);
    multiply(c, a.x >> 2 & kMask, b.x >> 2 & kMask, a.y >> 2 & kMask, b.y >> 2 & kMask, even.y,
             odd.y);
    multiply(c, a.x >> 4 & kMask, b.x >> 4 & kMask, a.y >> 4 & kMask, b.y >> 4 & kMask, even.z,
             odd.z);
    multiply(c, a.x >> 6 & kMask, b.x >> 6 & kMask, a.y >> 6 & kMask, b.y >> 6 & kMask, even.w,
             odd.w);
    acc[0] += group_part(first, t, c[0], c[1], x_scale, x_sum);
    acc[1] += group_part(second, t, c[2], c[3], x_scale, x_sum);
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
  if (w.layout == kPlanes) return w.type == BlockType::kQ8_0;
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

inline int pieces_of(const Rows& r) { return r.n_in / (r.codec == Codec::kF32 ? 4 : 16); }

// As few lanes a row as keep a lane's loads within kMaxLoads: short rows would leave lanes without work.
inline int lanes_for(const Rows& r) {
  int lanes = 4;
  while (lanes < 32 && (pieces_of(r) + lanes - 1) / lanes > kMaxLoads) lanes *= 2;
  return lanes;
}

}  // namespace k3::cuda::gemv
