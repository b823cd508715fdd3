// The second half of split attention: what the blocks know of a token becomes its result.
#pragma once

#include "kernels/cuda/mla_decode.cuh"

namespace k3::cuda::latent {

// Parts of a pair are half as many, and blocks of theirs twice: smaller ones run at once.
template <class C>
constexpr int kJoinThreads = C::kPair ? 256 : 512;

__device__ __forceinline__ float4 floats_of(uint2 v) {
  const float2 lo = unpack<__half>(v.x), hi = unpack<__half>(v.y);
  return {lo.x, lo.y, hi.x, hi.y};
}
__device__ __forceinline__ float4 floats_of(float4 v) { return v; }

// Where the caller wants one value: the context, or v of a part.
__device__ __forceinline__ void put(const MlaOut& out, int token, int head, int column, float v) {
  out.ctx.row(token)[out.part ? head * (kLatent + 2) + 2 + column : head * kLatent + column] = v;
}

// What is known of two heads: maxima (powers of two), sums, and of two latent columns their weighted values, (column, head):
// x = (0, 0), y = (0, 1), z = (1, 0), w = (1, 1).
struct Known {
  float2 top{-INFINITY, -INFINITY}, sum{0, 0};
  float4 v{0, 0, 0, 0};

  // Moves the maxima, which must not fall.
  __device__ __forceinline__ void move(float2 to) {
    const float2 keep{exp2f(top.x - to.x), exp2f(top.y - to.y)};
    top = to;
    sum.x *= keep.x, sum.y *= keep.y;
    v.x *= keep.x, v.y *= keep.y, v.z *= keep.x, v.w *= keep.y;
  }
  // Adds values of weight w0, w1.
  __device__ __forceinline__ void add(float4 x, float w0, float w1) {
    v.x = fmaf(x.x, w0, v.x), v.y = fmaf(x.y, w1, v.y);
    v.z = fmaf(x.z, w0, v.z), v.w = fmaf(x.w, w1, v.w);
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What one warp makes of parts warp, warp + kWarps, ...: all it reads is on its way at once.
template <class C, int kWarps>
__device__ Known join_some(const Args& a, int warp, int n_part, int first, int segment, int group,
                           int sixteen, int eight) {
  constexpr int N = C::kHeads, kBatch = 9;
  const int lane = static_cast<int>(threadIdx.x) % 32, head = eight * 8 + lane % 4 * 2;
  Known all;
  for (int base = warp; base < n_part; base += kWarps * kBatch) {
    typename C::Four v[kBatch];
    float2 tops[kBatch], sums[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      v[k] = {};
      tops[k] = {-INFINITY, -INFINITY};
      sums[k] = {0, 0};
      if (base + k * kWarps < n_part) {
        const std::int64_t part = part_of<C>(first + base + k * kWarps, segment, group);
        v[k] = reinterpret_cast<const typename C::Four*>(
            a.values)[((part * 32 + sixteen) * (N / 8) + eight) * 32 + lane];
        tops[k] = *reinterpret_cast<const float2*>(a.stats + part * 2 * N + head);
        sums[k] = *reinterpret_cast<const float2*>(a.stats + (part * 2 + 1) * N + head);
      }
    }
    float2 top = all.top;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) top = {fmaxf(top.x, tops[k].x), fmaxf(top.y, tops[k].y)};
    all.move(top);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const float w0 = sums[k].x * exp2f(tops[k].x - top.x),
                  w1 = sums[k].y * exp2f(tops[k].y - top.y);
      all.sum.x += w0, all.sum.y += w1;
      all.add(floats_of(v[k]), w0, w1);
    }
  }
  return all;
}
#endif

// Eight heads and 16 latent columns of one token and group a block (grid: 32, N / 8, tokens * groups).
template <class C>
__global__ void __launch_bounds__(kJoinThreads<C>, !C::kPair                       ? 1
                                                   : sizeof(typename C::Four) == 8 ? 3
                                                                                   : 2)
    join_parts_kernel(const __grid_constant__ Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kWarps = kJoinThreads<C> / 32;
  __shared__ int n_row[kMlaDecodeTok];
  __shared__ float4 values[kWarps][32], stats[kWarps][4];  // stats: maxima and sums of two heads
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const int sixteen = static_cast<int>(blockIdx.x), eight = static_cast<int>(blockIdx.y),
            token = static_cast<int>(blockIdx.z) / a.n_group,
            group = static_cast<int>(blockIdx.z) % a.n_group,
            segment = C::kPair ? token : static_cast<int>(blockIdx.z),
            n_list = C::kPair ? 1 : a.n_group, head0 = group * a.group_heads,
            n_head = min(a.group_heads, a.n_head - head0);
  let_next_kernel_start();
  if (tid < a.n_tok) n_row[tid] = static_cast<int>(a.shard.rows(a.pos[tid] + 1));
  __syncthreads();
  const Cut c = cut(n_row, a.n_tok, n_list, a.n_block);
  const int from = first_tile(n_row, segment, n_list), n_tile = tiles_of(n_row[token]);
  // In every block: who follows this kernel relies on decode_kernel's end.
  wait_for_last_kernel();
  if (n_tile == 0) {  // no rows here: the identity of a join over ranks
    for (int i = tid; i < 8 * 18 && a.out.part; i += kJoinThreads<C>) {
      const int head = eight * 8 + i / 18, k = i % 18;
      if (head >= n_head) break;
      float* to = a.out.ctx.row(token) + (head0 + head) * (kLatent + 2);
      if (k >= 2) to[2 + sixteen * 16 + k - 2] = 0;
      if (sixteen == 0 && k < 2) to[k] = k == 0 ? -INFINITY : 0.0f;
    }
    return;
  }
  const int first = from / c.per, n_part = (from + n_tile - 1) / c.per - first + 1;
  Known all = join_some<C, kWarps>(a, warp, n_part, first, segment, group, sixteen, eight);
  values[warp][lane] = all.v;
  if (lane < 4) stats[warp][lane] = {all.top.x, all.top.y, all.sum.x, all.sum.y};
  __syncthreads();
  if (warp != 0) return;
  const int n_warp = min(kWarps, n_part);  // the others have nothing
  for (int w = 1; w < n_warp; ++w) {
    const float4 s = stats[w][lane % 4];
    all.move({fmaxf(all.top.x, s.x), fmaxf(all.top.y, s.y)});
    const float w0 = exp2f(s.x - all.top.x), w1 = exp2f(s.y - all.top.y);
    all.sum.x = fmaf(s.z, w0, all.sum.x), all.sum.y = fmaf(s.w, w1, all.sum.y);
    all.add(values[w][lane], w0, w1);
  }
  for (int k = 0; k < 2; ++k) {
    const int local = eight * 8 + lane % 4 * 2 + k, head = head0 + local,
              column = sixteen * 16 + lane / 4;
    if (local >= n_head) continue;
    const float sum = k == 0 ? all.sum.x : all.sum.y, scale = a.out.part ? 1.0f : 1.0f / sum;
    put(a.out, token, head, column, (k == 0 ? all.v.x : all.v.y) * scale);
    put(a.out, token, head, column + 8, (k == 0 ? all.v.z : all.v.w) * scale);
    if (a.out.part && sixteen == 0 && lane < 4) {
      constexpr float kLn2 = 0.6931471805599453f;
      float* to = a.out.ctx.row(token) + head * (kLatent + 2);
      to[0] = (k == 0 ? all.top.x : all.top.y) * kLn2;
      to[1] = sum;
    }
  }
#endif
}

}  // namespace k3::cuda::latent
