// The latent cache cut over ranks, exact path: what this rank's rows say, and the join of all ranks' parts. A block takes one
// head of one token; a warp every eighth row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kWarps = 8, kPer = 32;  // 32 * kPer values of a row at most

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }

template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    attend_part_kernel(View<float> part, View<const float> q, float scale, MlaCache cache,
                       BatchView batch) {
  extern __shared__ float shared[];  // [kWarps][2 + latent]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int latent = static_cast<int>(cache.kv_latent),
            width = latent + static_cast<int>(cache.rope), one = latent + 2;
  const std::int64_t h = blockIdx.x, t = blockIdx.y, n_row = cache.shard.rows(batch.pos[t] + 1);
  const T* rows = reinterpret_cast<const T*>(cache.rows) + batch.slot[t] * cache.n_ctx * width;
  float qv[kPer], acc[kPer], top = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    qv[i] = i * 32 + lane < width ? q.row(t)[h * width + i * 32 + lane] * scale : 0.0f;
    acc[i] = 0;
  }
  for (std::int64_t s = warp; s < n_row; s += kWarps) {
    float r[kPer], dot = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      r[i] = i * 32 + lane < width ? load(rows + s * width + i * 32 + lane) : 0.0f;
      dot = fmaf(qv[i], r[i], dot);
    }
    dot = warp_sum(dot);
    const float new_top = fmaxf(top, dot), keep = expf(top - new_top), p = expf(dot - new_top);
    top = new_top;
    sum = fmaf(sum, keep, p);
#pragma unroll
    for (int i = 0; i < kPer; ++i) acc[i] = fmaf(p, r[i], acc[i] * keep);
  }
  float* mine = shared + warp * one;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (i * 32 + lane < latent) mine[2 + i * 32 + lane] = acc[i];
  }
  if (lane == 0) {
    mine[0] = top;
    mine[1] = sum;
  }
  __syncthreads();
  float all_top = -INFINITY;
  for (int w = 0; w < kWarps; ++w) all_top = fmaxf(all_top, shared[w * one]);
  float* out = part.row(t) + h * one;
  // Element 0 aside, sums are joined as values are: each by its warp's weight.
  for (int i = 1 + threadIdx.x; i < one; i += blockDim.x) {
    float v = 0;
    for (int w = 0; w < kWarps; ++w) {
      const float* from = shared + w * one;
      if (from[1] > 0) v = fmaf(from[i], expf(from[0] - all_top), v);
    }
    out[i] = v;
  }
  if (threadIdx.x == 0) out[0] = all_top;
}

__global__ void combine_kernel(View<float> ctx, View<const float> parts, int n_part, int latent) {
  const std::int64_t h = blockIdx.x, t = blockIdx.y, one = latent + 2;
  const auto part = [&](int p) { return parts.row(p * ctx.rows + t) + h * one; };
  float top = -INFINITY, sum = 0;
  for (int p = 0; p < n_part; ++p) top = fmaxf(top, part(p)[0]);
  for (int p = 0; p < n_part; ++p) {
    if (part(p)[1] > 0) sum = fmaf(part(p)[1], expf(part(p)[0] - top), sum);
  }
  for (int i = threadIdx.x; i < latent; i += blockDim.x) {
    float v = 0;
    for (int p = 0; p < n_part; ++p) {
      if (part(p)[1] > 0) v = fmaf(part(p)[2 + i], expf(part(p)[0] - top), v);
    }
    ctx.row(t)[h * latent + i] = v / sum;
  }
}

}  // namespace

void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head, float scale,
                     const MlaCache& cache, const BatchView& batch, cudaStream_t stream) {
  if (n_head == 0 || batch.n_tok == 0) return;
  const std::int64_t width = cache.kv_latent + cache.rope;
  if (width > 32 * kPer) {
    throw std::invalid_argument("mla_attend_part: cache rows of " + std::to_string(width) +
                                " values, at most 1024 are supported");
  }
  const dim3 grid(static_cast<unsigned>(n_head), static_cast<unsigned>(batch.n_tok));
  const auto shared = static_cast<std::size_t>(kWarps * (cache.kv_latent + 2)) * sizeof(float);
  const auto launch = [&]<class T>() {
    attend_part_kernel<T><<<grid, kWarps * 32, shared, stream>>>(part, q, scale, cache, batch);
  };
  switch (cache.type) {
    case CacheType::kF32:
      launch.template operator()<float>();
      break;
    case CacheType::kF16:
      launch.template operator()<__half>();
      break;
    case CacheType::kBF16:
      launch.template operator()<__nv_bfloat16>();
      break;
  }
  check_launch("attend_part_kernel");
}

void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part, std::int64_t n_head,
                 cudaStream_t stream) {
  if (n_head == 0 || ctx.rows == 0) return;
  combine_kernel<<<dim3(static_cast<unsigned>(n_head), static_cast<unsigned>(ctx.rows)), 128, 0,
                   stream>>>(ctx, parts, static_cast<int>(n_part),
                             static_cast<int>(ctx.cols / n_head));
  check_launch("combine_kernel");
}

}  // namespace k3::cuda
