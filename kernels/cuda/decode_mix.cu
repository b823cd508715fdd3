// Residual, mix over the bank and norm of one token in the fast path: one cluster of blocks, each with its columns of all
// streams in registers, exchanges the sums through its blocks' shared memory.
#include <cooperative_groups.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/pdl.cuh"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kCluster = 8;
constexpr int kThreads = 256;
constexpr int kMaxSources = 9;  // the published model's bank at its largest, and x

// Clusters are Hopper's; fused_mix() is not called on other devices, but their code must compile.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr int kWarps = kThreads / 32;
constexpr int kSums = 2 * kMaxSources;
constexpr int kFew = 6;  // sums that are not worth scattering

__device__ __forceinline__ float dot4(float4 a, float4 b) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

struct Exchange {
  float warp[kWarps][kSums];
  float block[2][kSums];  // of this block, read by the others; the second is the norm's
  float total[kSums];
};

// Lane k gets the warp's sum of v[k]: at each halving a lane hands over the half that is not its own.
__device__ __forceinline__ float scattered_sum(const float* values) {
  const int lane = threadIdx.x % 32;
  float v[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) v[i] = i < kSums ? values[i] : 0.0f;
#pragma unroll
  for (int o = 16; o > 0; o /= 2) {
    const bool upper = (lane & o) != 0;
#pragma unroll
    for (int i = 0; i < o; ++i) {
      const float give = upper ? v[i] : v[i + o], keep = upper ? v[i + o] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, o);
    }
  }
  return v[0];
}

// Sums `n` values over the cluster; the result is in sh.total on return.
__device__ __forceinline__ void cluster_sum(cg::cluster_group& cluster, Exchange& sh,
                                            const float* mine, int n, int round) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (n <= kFew) {
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if (i >= n) break;
      const float v = warp_sum(mine[i]);
      if (lane == 0) sh.warp[warp][i] = v;
    }
  } else {
    const float v = scattered_sum(mine);
    if (lane < n) sh.warp[warp][lane] = v;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < n) {
    float v = 0;
    for (int w = 0; w < kWarps; ++w) v += sh.warp[w][threadIdx.x];
    sh.block[round][threadIdx.x] = v;
  }
  cluster.sync();
  if (static_cast<int>(threadIdx.x) < n) {
    float v = 0;
    for (int b = 0; b < kCluster; ++b)
      v += *cluster.map_shared_rank(&sh.block[round][threadIdx.x], b);
    sh.total[threadIdx.x] = v;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) mix_step_kernel(const __grid_constant__ MixStep l) {
  __shared__ Exchange sh;
  cg::cluster_group cluster = cg::this_cluster();
  let_successor_start();
  const int n4 = static_cast<int>(l.x.cols) / 4, per = (n4 + kCluster - 1) / kCluster;
  const int i4 = static_cast<int>(blockIdx.x) * per + static_cast<int>(threadIdx.x);
  const bool here = static_cast<int>(threadIdx.x) < per && i4 < n4;
  const int n_source = static_cast<int>(l.n_bank) + 1;
  auto load = [&](const float* p) {
    return here ? *reinterpret_cast<const float4*>(p + i4 * 4) : float4{};
  };
  const float4 norm_w = load(l.norm_w);
  const float4 score_w = l.n_bank > 0 ? load(l.score_w) : float4{};
  wait_for_predecessor();

  float4 s[kMaxSources];
#pragma unroll
  for (int k = 0; k < kMaxSources - 1; ++k)
    s[k] = k < l.n_bank ? load(l.bank + k * l.bank_stride) : float4{};
  float4 x = load(l.x.data);
  if (!l.add.empty()) {
    const float4 a = load(l.add.data);
    x = l.restart ? a : float4{x.x + a.x, x.y + a.y, x.z + a.z, x.w + a.w};
    const bool bad = !isfinite(x.x) || !isfinite(x.y) || !isfinite(x.z) || !isfinite(x.w);
    if (here) *reinterpret_cast<float4*>(l.x.data + i4 * 4) = x;
    if (here && bad && l.first_nonfinite != nullptr) atomicMin(l.first_nonfinite, l.layer);
  }
  if (here && l.push != nullptr) *reinterpret_cast<float4*>(l.push + i4 * 4) = x;

  float4 h = x;
  if (l.n_bank > 0) {
    float sums[kSums];
#pragma unroll
    for (int k = 0; k < kMaxSources; ++k) {
      const float4 v = k < l.n_bank ? s[k < kMaxSources - 1 ? k : 0] : x;
      sums[2 * k] = k < n_source ? dot4(score_w, v) : 0.0f;
      sums[2 * k + 1] = k < n_source ? dot4(v, v) : 0.0f;
    }
    cluster_sum(cluster, sh, sums, 2 * n_source, 0);
    float p[kMaxSources], top = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < kMaxSources; ++k) {
      p[k] = k < n_source ? sh.total[2 * k] /
                                sqrtf(sh.total[2 * k + 1] / static_cast<float>(l.x.cols) + l.eps)
                          : -INFINITY;
      // A NaN score must not be passed over by the maximum: the sum below keeps it.
      top = fmaxf(top, p[k]);
    }
#pragma unroll
    for (int k = 0; k < kMaxSources; ++k) {
      p[k] = k < n_source ? expf(p[k] - top) : 0.0f;
      sum += p[k];
    }
    h = {};
#pragma unroll
    for (int k = 0; k < kMaxSources; ++k) {
      if (k >= n_source) break;
      const float4 v = k < l.n_bank ? s[k < kMaxSources - 1 ? k : 0] : x;
      const float w = p[k] / sum;
      h = {fmaf(w, v.x, h.x), fmaf(w, v.y, h.y), fmaf(w, v.z, h.z), fmaf(w, v.w, h.w)};
    }
  }
  const float square[kSums] = {dot4(h, h)};
  cluster_sum(cluster, sh, square, 1, 1);
  const float scale = 1.0f / sqrtf(sh.total[0] / static_cast<float>(l.x.cols) + l.eps);
  if (here) {
    *reinterpret_cast<float4*>(l.y.data + i4 * 4) = {h.x * scale * norm_w.x, h.y * scale * norm_w.y,
                                                     h.z * scale * norm_w.z,
                                                     h.w * scale * norm_w.w};
  }
  cluster.sync();  // a block's shared memory must outlive its readers
}

#else
__global__ void mix_step_kernel(const __grid_constant__ MixStep) {}
#endif

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace

bool fused_mix(const MixStep& m, cudaStream_t stream) {
  if (m.x.rows != 1 || m.x.cols % 4 != 0 || m.x.cols > kCluster * kThreads * 4 ||
      m.n_bank >= kMaxSources || m.bank_stride % 4 != 0 || !aligned(m.x.data) ||
      !aligned(m.y.data) || !aligned(m.bank) || !aligned(m.add.data) || !aligned(m.push) ||
      !aligned(m.score_w) || !aligned(m.norm_w))
    return false;
  launch_chained("mix_step_kernel", mix_step_kernel, dim3(kCluster), dim3(kThreads), 0, kCluster,
                 stream, m);
  return true;
}

}  // namespace k3::cuda
