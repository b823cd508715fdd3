// How a lane reads its share of a weight row, one codec per block type and layout. A warp walks a row in steps of
// 32 * kElems elements; a lane's kElems are consecutive.
//   Row at(w, mat, row)                  where the row's parts begin
//   float dot(row, i, x)                 sum of the kElems weights from element i on, times x[0 .. kElems)
//   float one(row, i)                    a single weight: the end of a row of plain floats
//   kFast                                built for speed: worth several tile shapes
#pragma once

#include <cstdint>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/layout.h"

namespace k3::cuda {

template <BlockType T>
struct RawCodec {
  static constexpr int kElems = 8;
  static constexpr bool kFast = false;
  struct Row {
    const std::byte* bytes;
    std::int64_t first;
  };
  static __device__ __forceinline__ Row at(const Weight& w, std::int64_t mat, std::int64_t row) {
    return {w.data + mat * w.mat_bytes + row * w.row_bytes, w.first};
  }
  static __device__ __forceinline__ float dot(const Row& r, std::int64_t i, const float* x) {
    float v[8], sum = 0;
    decode8<T>(r.bytes, r.first + i, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(v[j], x[j], sum);
    return sum;
  }
  static __device__ __forceinline__ float one(const Row& r, std::int64_t i) {
    return decode1<T>(r.bytes, r.first + i);
  }
};

// Rows of f32 are 16-byte aligned on the device.
template <>
struct RawCodec<BlockType::kF32> {
  static constexpr int kElems = 4;
  static constexpr bool kFast = true;
  using Row = const float*;
  static __device__ __forceinline__ Row at(const Weight& w, std::int64_t mat, std::int64_t row) {
    return reinterpret_cast<const float*>(w.data + mat * w.mat_bytes + row * w.row_bytes) + w.first;
  }
  static __device__ __forceinline__ float dot(Row r, std::int64_t i, const float* x) {
    const float4 v = *reinterpret_cast<const float4*>(r + i);
    return fmaf(v.w, x[3], fmaf(v.z, x[2], fmaf(v.y, x[1], v.x * x[0])));
  }
  static __device__ __forceinline__ float one(Row r, std::int64_t i) { return r[i]; }
};

struct Q8PlanesCodec {
  static constexpr int kElems = 4;
  static constexpr bool kFast = true;
  struct Row {
    const std::int8_t* codes;
    const std::uint16_t* scales;
  };
  static __device__ __forceinline__ Row at(const Weight& w, std::int64_t mat, std::int64_t row) {
    const std::byte* p = w.data + mat * w.mat_bytes + row * w.row_bytes;
    return {reinterpret_cast<const std::int8_t*>(p),
            reinterpret_cast<const std::uint16_t*>(p + (w.n_in + 15) / 16 * 16)};
  }
  static __device__ __forceinline__ float dot(const Row& r, std::int64_t i, const float* x) {
    const int q = *reinterpret_cast<const int*>(r.codes + i);
    const float d = half_value(r.scales[i / 32]);
    float sum = static_cast<float>(static_cast<std::int8_t>(q)) * x[0];
    sum = fmaf(static_cast<float>(static_cast<std::int8_t>(q >> 8)), x[1], sum);
    sum = fmaf(static_cast<float>(static_cast<std::int8_t>(q >> 16)), x[2], sum);
    sum = fmaf(static_cast<float>(q >> 24), x[3], sum);
    return d * sum;
  }
  static __device__ __forceinline__ float one(const Row& r, std::int64_t i) {
    return half_value(r.scales[i / 32]) * static_cast<float>(r.codes[i]);
  }
};

struct Iq1sPlanesCodec {
  static constexpr int kElems = 8;
  static constexpr bool kFast = true;
  struct Row {
    const std::uint32_t* codes;
    const std::uint8_t* scales;
    const std::uint16_t* d;
    std::int64_t first;  // elements of the first 256-block before the band
  };
  static __device__ __forceinline__ Row at(const Weight& w, std::int64_t mat, std::int64_t row) {
    const std::byte* p = w.data + mat * w.mat_bytes + row * w.row_bytes;
    const std::byte* scales = p + (w.n_in / 4 + 15) / 16 * 16;
    const std::byte* d = scales + ((w.n_in / 32 + 1) / 2 + 15) / 16 * 16;
    return {reinterpret_cast<const std::uint32_t*>(p),
            reinterpret_cast<const std::uint8_t*>(scales),
            reinterpret_cast<const std::uint16_t*>(d), w.first};
  }
  static __device__ __forceinline__ float dot(const Row& r, std::int64_t i, const float* x) {
    const std::int64_t group = i / 32;
    const unsigned s = r.scales[group / 2] >> (group % 2 * 4);
    const float scale = half_value(r.d[(r.first + i) / 256]) * static_cast<float>(2 * (s & 7) + 1);
    const float delta = s & 8 ? -1.125f : -0.875f;
    const std::uint32_t codes = r.codes[i / 16] >> (i % 16 / 2);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float code = static_cast<float>(codes >> (8 * (j % 4) + 2 * (j / 4)) & 3);
      sum = fmaf(code + delta, x[j], sum);
    }
    return scale * sum;
  }
  static __device__ __forceinline__ float one(const Row& r, std::int64_t i) {
    float x[8] = {};
    x[i % 8] = 1.0f;
    return dot(r, i / 8 * 8, x);
  }
};

// Calls f.template operator()<Codec>() for a weight's type and layout.
template <class F>
void with_codec(const Weight& w, const F& f) {
  if (w.layout == kPlanes) {
    return w.type == BlockType::kQ8_0 ? f.template operator()<Q8PlanesCodec>()
                                      : f.template operator()<Iq1sPlanesCodec>();
  }
  with_type(w.type, [&]<BlockType T>() { f.template operator()<RawCodec<T>>(); });
}

// kElems activations into registers; kVector: x is 16-byte aligned wherever a lane reads.
template <int kElems, bool kVector>
__device__ __forceinline__ void load_x(const float* x, float* out) {
  if constexpr (kVector) {
#pragma unroll
    for (int j = 0; j < kElems; j += 4) {
      const float4 v = *reinterpret_cast<const float4*>(x + j);
      out[j] = v.x;
      out[j + 1] = v.y;
      out[j + 2] = v.z;
      out[j + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kElems; ++j) out[j] = x[j];
  }
}

// kRows rows against kTok tokens by one warp; acc[r][t] is this lane's part, to be summed over the warp. Rows past the
// matrix repeat the last: their sums are not written.
template <class Codec, int kRows, int kTok, bool kVector>
__device__ __forceinline__ void rows_dot(const Weight& w, std::int64_t mat, std::int64_t row0,
                                         const float* x, std::int64_t x_stride, int n_tok,
                                         float (&acc)[kRows][kTok]) {
  constexpr int kElems = Codec::kElems;
  const int lane = threadIdx.x % 32;
  typename Codec::Row rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = Codec::at(w, mat, min(row0 + r, w.n_out - 1));
  const std::int64_t whole = w.n_in / kElems * kElems;
#pragma unroll(kTok == 1 ? 4 : 1)
  for (std::int64_t i = lane * kElems; i < whole; i += 32 * kElems) {
#pragma unroll
    for (int t = 0; t < kTok; ++t) {
      float v[kElems];
      load_x<kElems, kVector>(x + min(t, n_tok - 1) * x_stride + i, v);
#pragma unroll
      for (int r = 0; r < kRows; ++r) acc[r][t] += Codec::dot(rows[r], i, v);
    }
  }
  if (whole + lane >= w.n_in) return;
#pragma unroll
  for (int t = 0; t < kTok; ++t) {
    const float v = x[min(t, n_tok - 1) * x_stride + whole + lane];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      acc[r][t] = fmaf(Codec::one(rows[r], whole + lane), v, acc[r][t]);
  }
}

}  // namespace k3::cuda
