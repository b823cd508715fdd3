// Attention over the latent cache in the absorbed form, exact path: online softmax in f32, a warp takes every eighth row, and
// long caches are split over blocks whose partial results a second kernel joins.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kWarps = 8;
constexpr std::size_t kScratchFloats = std::size_t{8} << 20;
constexpr std::int64_t kRowsPerSplit = 256;
constexpr std::int64_t kMaxSplits = 64;
constexpr std::int64_t kMaxSplitTok = 16;  // more tokens fill the device without splitting

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ __forceinline__ void store(float* p, float v) { *p = v; }
__device__ __forceinline__ void store(__half* p, float v) { *p = __float2half_rn(v); }
__device__ __forceinline__ void store(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

template <class T>
__global__ void append_kernel(View<const float> c, const float* w, float eps, MlaCache cache,
                              BatchView batch) {
  __shared__ float scratch[33];
  const std::int64_t t = blockIdx.x, width = cache.kv_latent + cache.rope;
  if (!cache.shard.keeps(batch.pos[t])) return;
  float square = 0;
  for (std::int64_t i = threadIdx.x; i < cache.kv_latent; i += blockDim.x)
    square = fmaf(c.row(t)[i], c.row(t)[i], square);
  square = block_sum(square, scratch);
  const float scale = 1.0f / sqrtf(square / static_cast<float>(cache.kv_latent) + eps);
  T* row = reinterpret_cast<T*>(cache.rows) +
           (batch.slot[t] * cache.n_ctx + cache.shard.rows(batch.pos[t])) * width;
  for (std::int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    store(row + i, i < cache.kv_latent ? c.row(t)[i] * scale * w[i] : c.row(t)[i]);
  }
}

__global__ void rope_part_kernel(View<float> q_abs, View<const float> q, int nope, int latent,
                                 int rope) {
  const std::int64_t h = blockIdx.x, t = blockIdx.y;
  for (int i = threadIdx.x; i < rope; i += blockDim.x) {
    q_abs.row(t)[h * (latent + rope) + latent + i] = q.row(t)[h * (nope + rope) + nope + i];
  }
}

// What a warp, a block or a split knows of its rows: exp-weights relative to top, their sum, the weighted values.
// kPer: 32 * kPer >= width of a row.
template <class T, int kPer>
__global__ void __launch_bounds__(kWarps * 32)
    attend_kernel(View<float> ctx, View<const float> q, float scale, MlaCache cache,
                  BatchView batch, int n_split, float* partial) {
  extern __shared__ float shared[];  // [kWarps][latent + 2]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int latent = static_cast<int>(cache.kv_latent),
            width = latent + static_cast<int>(cache.rope);
  const std::int64_t t = blockIdx.z, h = blockIdx.y, n_head = gridDim.y, split = blockIdx.x;
  const std::int64_t n_row = batch.pos[t] + 1, per = (n_row + n_split - 1) / n_split;
  const std::int64_t begin = split * per, end = min(begin + per, n_row);
  const T* rows = reinterpret_cast<const T*>(cache.rows) + batch.slot[t] * cache.n_ctx * width;

  float qv[kPer], acc[kPer], top = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    qv[i] = i * 32 + lane < width ? q.row(t)[h * width + i * 32 + lane] * scale : 0.0f;
    acc[i] = 0;
  }
  for (std::int64_t s = begin + warp; s < end; s += kWarps) {
    const T* row = rows + s * width;
    float r[kPer], dot = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      r[i] = i * 32 + lane < width ? load(row + i * 32 + lane) : 0.0f;
      dot = fmaf(qv[i], r[i], dot);
    }
    dot = warp_sum(dot);
    const float new_top = fmaxf(top, dot), keep = expf(top - new_top), p = expf(dot - new_top);
    top = new_top;
    sum = fmaf(sum, keep, p);
#pragma unroll
    for (int i = 0; i < kPer; ++i) acc[i] = fmaf(p, r[i], acc[i] * keep);
  }
  float* mine = shared + warp * (latent + 2);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (i * 32 + lane < latent) mine[2 + i * 32 + lane] = acc[i];
  }
  if (lane == 0) {
    mine[0] = top;
    mine[1] = sum;
  }
  __syncthreads();
  float all_top = -INFINITY, all_sum = 0;
  for (int w = 0; w < kWarps; ++w) all_top = fmaxf(all_top, shared[w * (latent + 2)]);
  float weight[kWarps];
  for (int w = 0; w < kWarps; ++w) {
    const float* one = shared + w * (latent + 2);
    weight[w] = one[1] > 0 ? expf(one[0] - all_top) : 0.0f;  // a warp without rows has top -inf
    all_sum = fmaf(one[1], weight[w], all_sum);
  }
  float* out = partial + ((t * n_head + h) * n_split + split) * (latent + 2);
  for (int i = threadIdx.x; i < latent; i += blockDim.x) {
    float v = 0;
    for (int w = 0; w < kWarps; ++w) v = fmaf(shared[w * (latent + 2) + 2 + i], weight[w], v);
    if (n_split == 1) {
      ctx.row(t)[h * latent + i] = v / all_sum;
    } else {
      out[2 + i] = v;
    }
  }
  if (n_split > 1 && threadIdx.x == 0) {
    out[0] = all_top;
    out[1] = all_sum;
  }
}

__global__ void join_kernel(View<float> ctx, const float* partial, int n_split, int latent) {
  const std::int64_t h = blockIdx.x, t = blockIdx.y;
  const float* parts = partial + (t * gridDim.x + h) * n_split * (latent + 2);
  float top = -INFINITY, sum = 0;
  for (int s = 0; s < n_split; ++s) top = fmaxf(top, parts[s * (latent + 2)]);
  for (int s = 0; s < n_split; ++s) {
    const float* one = parts + s * (latent + 2);
    if (one[1] > 0) sum = fmaf(one[1], expf(one[0] - top), sum);
  }
  for (int i = threadIdx.x; i < latent; i += blockDim.x) {
    float v = 0;
    for (int s = 0; s < n_split; ++s) {
      const float* one = parts + s * (latent + 2);
      if (one[1] > 0) v = fmaf(one[2 + i], expf(one[0] - top), v);
    }
    ctx.row(t)[h * latent + i] = v / sum;
  }
}

__global__ void sigmoid_gate_kernel(View<float> y, View<const float> gate) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                     t = blockIdx.y;
  if (i < y.cols) y.row(t)[i] *= sigmoid(gate.row(t)[i]);
}

template <class F>
void with_cache_type(CacheType type, const F& f) {
  switch (type) {
    case CacheType::kF32:
      return f.template operator()<float>();
    case CacheType::kF16:
      return f.template operator()<__half>();
    case CacheType::kBF16:
      return f.template operator()<__nv_bfloat16>();
  }
}

// Splits are fixed by the context, not by the position: a captured step keeps its grid.
int split_count(std::int64_t n_ctx, std::int64_t n_tok, std::int64_t n_head, std::int64_t latent) {
  if (n_tok > kMaxSplitTok) return 1;
  const std::int64_t fit =
      static_cast<std::int64_t>(kScratchFloats) / (n_tok * n_head * (latent + 2));
  return static_cast<int>(std::clamp<std::int64_t>((n_ctx + kRowsPerSplit - 1) / kRowsPerSplit, 1,
                                                   std::min(kMaxSplits, fit)));
}

}  // namespace

std::size_t mla_scratch_floats() { return kScratchFloats; }

void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                const BatchView& batch, cudaStream_t stream) {
  if (batch.n_tok == 0) return;
  with_cache_type(cache.type, [&]<class T>() {
    append_kernel<T>
        <<<static_cast<unsigned>(batch.n_tok), 128, 0, stream>>>(c, w, eps, cache, batch);
  });
  check_launch("append_kernel");
}

void mla_rope_part(View<float> q_abs, View<const float> q, std::int64_t n_head, std::int64_t nope,
                   std::int64_t kv_latent, std::int64_t rope, cudaStream_t stream) {
  if (n_head == 0 || q.rows == 0) return;
  rope_part_kernel<<<dim3(static_cast<unsigned>(n_head), static_cast<unsigned>(q.rows)), 64, 0,
                     stream>>>(q_abs, q, static_cast<int>(nope), static_cast<int>(kv_latent),
                               static_cast<int>(rope));
  check_launch("rope_part_kernel");
}

void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                const MlaCache& cache, const BatchView& batch, float* partial, cudaStream_t stream,
                bool one_split) {
  if (n_head == 0 || batch.n_tok == 0) return;
  if (one_split && batch.n_tok > kMaxSplitTok) {
    for (std::int64_t t = 0; t < batch.n_tok; t += kMaxSplitTok) {
      BatchView some = batch;
      some.n_tok = std::min(kMaxSplitTok, batch.n_tok - t);
      some.pos += t;
      some.slot += t;
      mla_attend(ctx.slice(t, some.n_tok), q.slice(t, some.n_tok), n_head, scale, cache, some,
                 partial, stream, true);
    }
    return;
  }
  const std::int64_t width = cache.kv_latent + cache.rope;
  if (width > 1024) {
    throw std::invalid_argument("mla_attend: cache rows of " + std::to_string(width) +
                                " values, at most 1024 are supported");
  }
  const int n_split =
      split_count(cache.n_ctx, one_split ? kMaxSplitTok : batch.n_tok, n_head, cache.kv_latent);
  const dim3 grid(static_cast<unsigned>(n_split), static_cast<unsigned>(n_head),
                  static_cast<unsigned>(batch.n_tok));
  const auto shared = static_cast<std::size_t>(kWarps * (cache.kv_latent + 2)) * sizeof(float);
  with_cache_type(cache.type, [&]<class T>() {
    auto launch = [&]<int kPer>() {
      attend_kernel<T, kPer>
          <<<grid, kWarps * 32, shared, stream>>>(ctx, q, scale, cache, batch, n_split, partial);
    };
    if (width <= 4 * 32) {
      launch.template operator()<4>();
    } else if (width <= 8 * 32) {
      launch.template operator()<8>();
    } else if (width <= 18 * 32) {  // K3: 512 + 64
      launch.template operator()<18>();
    } else {
      launch.template operator()<32>();
    }
  });
  check_launch("attend_kernel");
  if (n_split == 1) return;
  join_kernel<<<dim3(static_cast<unsigned>(n_head), static_cast<unsigned>(batch.n_tok)), 128, 0,
                stream>>>(ctx, partial, n_split, static_cast<int>(cache.kv_latent));
  check_launch("join_kernel");
}

void sigmoid_gate(View<float> y, View<const float> gate, cudaStream_t stream) {
  if (y.empty()) return;
  sigmoid_gate_kernel<<<dim3(static_cast<unsigned>((y.cols + 255) / 256),
                             static_cast<unsigned>(y.rows)),
                        256, 0, stream>>>(y, gate);
  check_launch("sigmoid_gate_kernel");
}

}  // namespace k3::cuda
