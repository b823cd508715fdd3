// Routing and routed experts in the exact path. A warp per output row, as in matmul.cu; the sum over a token's experts is
// taken in the order of choice, whatever ran first.
#include <algorithm>
#include <stdexcept>

#include "kernels/cuda/check.h"
#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRouteThreads = 256;
constexpr float kWeightFloor = 6.103515625e-5f;  // 2^-14, as the reference has it

// Larger for a larger key, then for a lower index; never 0. A NaN comes after every number.
__device__ __forceinline__ unsigned long long rank_key(float key, int index) {
  unsigned bits = __float_as_uint(key);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (isnan(key)) bits = 0;
  return static_cast<unsigned long long>(bits) << 32 | (0xffffffffu - static_cast<unsigned>(index));
}

__device__ __forceinline__ unsigned long long block_max(unsigned long long v,
                                                        unsigned long long* scratch) {
  for (int o = 16; o > 0; o /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, o));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  for (int w = 0; w < kRouteThreads / 32; ++w) v = max(v, scratch[w]);
  return v;
}

// A block per token; p: the token's probabilities in shared memory, taken marks those already chosen.
__global__ void __launch_bounds__(kRouteThreads)
    route_kernel(View<std::int32_t> ids, View<float> weights, View<const float> logits,
                 const float* bias, std::int64_t bias_stride, bool normalise, float scale) {
  extern __shared__ float p[];  // [n] probabilities, [n] keys
  __shared__ unsigned long long scratch[kRouteThreads / 32];
  const int n = static_cast<int>(logits.cols), k = static_cast<int>(ids.cols);
  const std::int64_t t = blockIdx.x;
  float* key = p + n;
  for (int e = threadIdx.x; e < n; e += kRouteThreads) {
    p[e] = sigmoid(logits.row(t)[e]);
    key[e] = p[e] + bias[t * bias_stride + e];
  }
  __syncthreads();
  std::uint64_t below = ~0ull;  // the choices so far have keys from here up
  for (int j = 0; j < k; ++j) {
    unsigned long long best = 0;
    for (int e = threadIdx.x; e < n; e += kRouteThreads) {
      const unsigned long long r = rank_key(key[e], e);
      if (r < below) best = max(best, r);
    }
    best = block_max(best, scratch);
    below = best;
    if (threadIdx.x == 0) {
      const auto e = static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
      ids.row(t)[j] = e;
      weights.row(t)[j] = p[e];
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0;
  for (int j = 0; j < k; ++j) sum += weights.row(t)[j];
  const float denom = normalise ? fmaxf(sum, kWeightFloor) : 1.0f,
              factor = scale != 0.0f ? scale : 1.0f;
  for (int j = 0; j < k; ++j) weights.row(t)[j] = weights.row(t)[j] / denom * factor;
}

// Rows a warp takes in the two halves of an expert.
constexpr int kInRows = 2;
constexpr int kOutRows = 1;

__device__ __forceinline__ float situ_value(float g, float u, Situ p) {
  const float gate = p.beta * tanhf(g / p.beta) * sigmoid(g);
  return gate * (p.lambda > 0 ? p.lambda * tanhf(u / p.lambda) : u);
}

// hidden[choice][row] = gate . z, or (second pass) situ(hidden, up . z); choice = token * k + place.
template <class Codec, bool kSecond, bool kVector>
__global__ void __launch_bounds__(kWarps * 32)
    expert_in_kernel(float* hidden, View<const float> z, View<const std::int32_t> ids,
                     const __grid_constant__ Weight w, std::int64_t expert_begin, Situ situ) {
  const std::int64_t t = blockIdx.y / ids.cols,
                     e = ids.row(t)[blockIdx.y % ids.cols] - expert_begin;
  const std::int64_t row0 =
      (static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kInRows;
  if (e < 0 || e >= w.n_mat || row0 >= w.n_out) return;
  float acc[kInRows][1] = {};
  rows_dot<Codec, kInRows, 1, kVector>(w, e, row0, z.row(t), 0, 1, acc);
#pragma unroll
  for (int r = 0; r < kInRows; ++r) {
    const float v = warp_sum(acc[r][0]);
    if (threadIdx.x % 32 != 0 || row0 + r >= w.n_out) continue;
    float& h = hidden[blockIdx.y * w.n_out + row0 + r];
    h = kSecond ? situ_value(h, v, situ) : v;
  }
}

template <class Codec, bool kVector>
__global__ void __launch_bounds__(kWarps * 32)
    expert_out_kernel(View<float> m, const float* hidden, View<const std::int32_t> ids,
                      View<const float> weights, const __grid_constant__ Weight w,
                      std::int64_t expert_begin) {
  const std::int64_t t = blockIdx.y;
  const std::int64_t row0 =
      (static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * kOutRows;
  if (row0 >= w.n_out) return;
  float sum[kOutRows] = {};
  for (std::int64_t j = 0; j < ids.cols; ++j) {
    const std::int64_t e = ids.row(t)[j] - expert_begin;
    if (e < 0 || e >= w.n_mat) continue;
    float acc[kOutRows][1] = {};
    rows_dot<Codec, kOutRows, 1, kVector>(w, e, row0, hidden + (t * ids.cols + j) * w.n_in, 0, 1,
                                          acc);
#pragma unroll
    for (int r = 0; r < kOutRows; ++r) sum[r] += weights.row(t)[j] * warp_sum(acc[r][0]);
  }
#pragma unroll
  for (int r = 0; r < kOutRows; ++r) {
    if (threadIdx.x % 32 == 0 && row0 + r < w.n_out) m.row(t)[row0 + r] = sum[r];
  }
}

__global__ void situ_kernel(View<float> g, View<const float> u, Situ p) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                     t = blockIdx.y;
  if (i < g.cols) g.row(t)[i] = situ_value(g.row(t)[i], u.row(t)[i], p);
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

bool vector_ok(const float* x, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(x) % 16 == 0 && stride % 4 == 0;
}

template <bool kSecond>
void launch_in(float* hidden, View<const float> z, View<const std::int32_t> ids, const Weight& w,
               std::int64_t begin, Situ p, cudaStream_t stream) {
  const dim3 grid(blocks_for(w.n_out, kWarps * kInRows),
                  static_cast<unsigned>(ids.rows * ids.cols));
  with_codec(w, [&]<class Codec>() {
    if constexpr (Codec::kFast) {
      if (vector_ok(z.data, z.stride)) {
        expert_in_kernel<Codec, kSecond, true>
            <<<grid, kWarps * 32, 0, stream>>>(hidden, z, ids, w, begin, p);
        return;
      }
    }
    expert_in_kernel<Codec, kSecond, false>
        <<<grid, kWarps * 32, 0, stream>>>(hidden, z, ids, w, begin, p);
  });
  check_launch("expert_in_kernel");
}

void launch_out(View<float> m, const float* hidden, View<const std::int32_t> ids,
                View<const float> weights, const Weight& w, std::int64_t begin,
                cudaStream_t stream) {
  const dim3 grid(blocks_for(w.n_out, kWarps * kOutRows), static_cast<unsigned>(m.rows));
  with_codec(w, [&]<class Codec>() {
    if constexpr (Codec::kFast) {
      if (vector_ok(hidden, w.n_in)) {
        expert_out_kernel<Codec, true>
            <<<grid, kWarps * 32, 0, stream>>>(m, hidden, ids, weights, w, begin);
        return;
      }
    }
    expert_out_kernel<Codec, false>
        <<<grid, kWarps * 32, 0, stream>>>(m, hidden, ids, weights, w, begin);
  });
  check_launch("expert_out_kernel");
}

}  // namespace

void route(View<std::int32_t> ids, View<float> weights, View<const float> logits, const float* bias,
           std::int64_t bias_stride, bool normalise, float scale, cudaStream_t stream) {
  if (logits.empty()) return;
  const auto shared = static_cast<std::size_t>(2 * logits.cols) * sizeof(float);
  if (shared > 48 * 1024) throw std::invalid_argument("route: more than 6144 experts");
  route_kernel<<<static_cast<unsigned>(logits.rows), kRouteThreads, shared, stream>>>(
      ids, weights, logits, bias, bias_stride, normalise, scale);
  check_launch("route_kernel");
}

void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
             View<const float> weights, const ExpertWeights& w, Situ p, float* hidden,
             std::size_t hidden_floats, cudaStream_t stream) {
  if (m.empty()) return;
  if (w.gate->empty() || w.down->empty()) {
    check(cudaMemset2DAsync(m.data, static_cast<std::size_t>(m.stride) * sizeof(float), 0,
                            static_cast<std::size_t>(m.cols) * sizeof(float),
                            static_cast<std::size_t>(m.rows), stream),
          "cudaMemset2DAsync");
    return;
  }
  const std::int64_t per_tok = ids.cols * w.gate->n_out;
  const std::int64_t step =
      std::min<std::int64_t>(static_cast<std::int64_t>(hidden_floats) / per_tok, 65535 / ids.cols);
  if (step < 1)
    throw std::invalid_argument("experts: one token's hidden values do not fit the scratch memory");
  for (std::int64_t t = 0; t < m.rows; t += step) {
    const std::int64_t n = std::min(step, m.rows - t);
    launch_in<false>(hidden, z.slice(t, n), ids.slice(t, n), *w.gate, w.expert_begin, p, stream);
    launch_in<true>(hidden, z.slice(t, n), ids.slice(t, n), *w.up, w.expert_begin, p, stream);
    launch_out(m.slice(t, n), hidden, ids.slice(t, n), weights.slice(t, n), *w.down, w.expert_begin,
               stream);
  }
}

void situ(View<float> g, View<const float> u, Situ p, cudaStream_t stream) {
  if (g.empty()) return;
  situ_kernel<<<dim3(blocks_for(g.cols, 256), static_cast<unsigned>(g.rows)), 256, 0, stream>>>(
      g, u, p);
  check_launch("situ_kernel");
}

}  // namespace k3::cuda
