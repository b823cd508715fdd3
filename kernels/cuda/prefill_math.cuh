// Small device functions of the prefill kernels.
#pragma once

#include <cstdint>

#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace k3::cuda {

__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return {pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]),
          pack_half2(v[6], v[7])};
}

// The power of two that brings a row whose largest magnitude is `top` to [2^10, 2^11): far from overflow, and what f16 drops
// of it is still a normal f16. 1 for rows of zeros and rows that are not finite.
__device__ __forceinline__ float row_factor(float top) {
  if (!(top > 0.0f) || !isfinite(top)) return 1.0f;
  return ldexpf(1.0f, min(10 - ilogbf(top), 100));
}

// scratch: 33 floats, free to use again after return.
__device__ __forceinline__ float block_max(float v, float* scratch) {
  v = warp_max(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) v = fmaxf(v, scratch[w]);
  __syncthreads();
  return v;
}

// Elements [i, i + 8) of a weight's row, i a multiple of 8 and i + 8 <= n_in.
template <class Codec>
__device__ __forceinline__ void read_octet(const Weight& w, std::int64_t mat, std::int64_t row,
                                           std::int64_t i, float (&v)[8]) {
  octet_at(Codec::at(w, mat, row), Codec{}, i, v);
}
template <BlockType T>
__device__ __forceinline__ void octet_at(const typename RawCodec<T>::Row& r, RawCodec<T>,
                                         std::int64_t i, float (&v)[8]) {
  if constexpr (T == BlockType::kF32) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = r[i + j];
  } else {
    decode8<T>(r.bytes, r.first + i, v);
  }
}
__device__ __forceinline__ void octet_at(const Q8PlanesCodec::Row& r, Q8PlanesCodec, std::int64_t i,
                                         float (&v)[8]) {
  const int2 q = *reinterpret_cast<const int2*>(r.codes + i);
  const float d = half_value(r.scales[i / 32]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v[j] = d * static_cast<float>(static_cast<std::int8_t>(q.x >> (8 * j)));
    v[j + 4] = d * static_cast<float>(static_cast<std::int8_t>(q.y >> (8 * j)));
  }
}
__device__ __forceinline__ void octet_at(const Iq1sPlanesCodec::Row& r, Iq1sPlanesCodec,
                                         std::int64_t i, float (&v)[8]) {
  const std::int64_t group = i / 32;
  const unsigned s = r.scales[group / 2] >> (group % 2 * 4);
  const float scale = half_value(r.d[(r.first + i) / 256]) * static_cast<float>(2 * (s & 7) + 1);
  const float delta = s & 8 ? -1.125f : -0.875f;
  const std::uint32_t codes = r.codes[i / 16] >> (i % 16 / 2);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    v[j] = scale * (static_cast<float>(codes >> (8 * (j % 4) + 2 * (j / 4)) & 3) + delta);
}

}  // namespace k3::cuda
