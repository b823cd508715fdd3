// Around the grouped product of routed experts: choices sorted by expert on the device, their latents gathered into panels,
// and each token's results added up in the order of choice, whatever ran first.
#include "kernels/cuda/check.h"
#include "kernels/cuda/expert_gemm.h"
#include "kernels/cuda/prefill_math.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPlanThreads = 1024;

__device__ __forceinline__ std::int32_t expert_of(const View<const std::int32_t>& ids,
                                                  std::int64_t choice) {
  return ids.row(choice / ids.cols)[choice % ids.cols];
}

// A block per expert.
__global__ void __launch_bounds__(kThreads)
    count_kernel(std::int32_t* counts, const View<const std::int32_t> ids, std::int64_t begin) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  int mine = 0;
  for (std::int64_t i = threadIdx.x; i < ids.rows * ids.cols; i += kThreads)
    mine += expert_of(ids, i) == begin + blockIdx.x;
  for (int o = 16; o > 0; o /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, o);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, mine);
  __syncthreads();
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// Sum of the values of all threads before this one; *total: of all threads.
__device__ __forceinline__ int block_prefix(int v, int* scratch, int* total) {
  scratch[threadIdx.x] = v;
  __syncthreads();
  for (unsigned o = 1; o < blockDim.x; o *= 2) {
    const int add = threadIdx.x >= o ? scratch[threadIdx.x - o] : 0;
    __syncthreads();
    scratch[threadIdx.x] += add;
    __syncthreads();
  }
  *total = scratch[blockDim.x - 1];
  const int before = scratch[threadIdx.x] - v;
  __syncthreads();
  return before;
}

// One block: where each expert's rows begin (multiples of 8), and its tiles of at most kMaxTile rows, of nearly one size.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(ExpertRows rows, int n_expert) {
  __shared__ int scratch[kPlanThreads];
  int row = 0, tile = 0;
  for (int e0 = 0; e0 < n_expert; e0 += kPlanThreads) {
    const int e = e0 + static_cast<int>(threadIdx.x);
    const int count = e < n_expert ? rows.counts[e] : 0;
    const int n_tile = (count + kMaxTile - 1) / kMaxTile;
    int all_rows, all_tiles;
    const int row0 = row + block_prefix((count + 7) / 8 * 8, scratch, &all_rows);
    const int tile0 = tile + block_prefix(n_tile, scratch, &all_tiles);
    if (e < n_expert) rows.begin[e] = row0;
    const int size = n_tile > 0 ? ((count + n_tile - 1) / n_tile + 7) / 8 * 8 : 0;
    for (int i = 0; i < n_tile; ++i)
      rows.tiles[tile0 + i] = {e, row0 + i * size, min(size, count - i * size), 0};
    row += all_rows;
    tile += all_tiles;
  }
  if (threadIdx.x == 0) *rows.n_tile = tile;
}

// A block per expert gives its choices their rows, in the order of the tokens.
__global__ void __launch_bounds__(kThreads)
    place_kernel(ExpertRows rows, const View<const std::int32_t> ids, std::int64_t begin) {
  __shared__ int per_warp[kThreads / 32];
  const std::int64_t n = ids.rows * ids.cols;
  int next = rows.begin[blockIdx.x];
  for (std::int64_t i0 = 0; i0 < n; i0 += kThreads) {
    const std::int64_t i = i0 + threadIdx.x;
    const bool mine = i < n && expert_of(ids, i) == begin + blockIdx.x;
    const unsigned votes = __ballot_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
    for (unsigned w = 0; w < kThreads / 32; ++w) {
      if (w < threadIdx.x / 32) before += per_warp[w];
      all += per_warp[w];
    }
    if (mine) rows.row_of[i] = next + before + __popc(votes & ((1u << threadIdx.x % 32) - 1));
    next += all;
    __syncthreads();
  }
}

// A block per token: its latent as f16, scaled, in slot order, to the row of each of its choices.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Panels to, ExpertRows rows, const View<const float> z, int k) {
  extern __shared__ __half latent[];  // in the order of the model
  __shared__ float scratch[33];
  const std::int64_t t = blockIdx.x, width = to.n_panel * kPanel;
  float top = 0;
  for (std::int64_t i = threadIdx.x; i < z.cols; i += kThreads)
    top = fmaxf(top, fabsf(z.row(t)[i]));
  top = block_max(top, scratch);
  const float up = row_factor(top);
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads)
    latent[i] = __float2half_rn(i < z.cols ? z.row(t)[i] * up : 0.0f);
  __syncthreads();
  if (threadIdx.x < k) {
    const int row = rows.row_of[t * k + threadIdx.x];
    if (row >= 0) rows.scale[row] = 1.0f / up;
  }
  for (std::int64_t p = threadIdx.x; p < width / 8; p += kThreads) {
    uint4 piece;
    auto* value = reinterpret_cast<__half*>(&piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = latent[element_of_slot(p * 8 + i)];
    for (int j = 0; j < k; ++j) {
      const int row = rows.row_of[t * k + j];
      if (row >= 0)
        *panel_piece(to, p / kPanelPieces, row, static_cast<int>(p % kPanelPieces)) = piece;
    }
  }
}

// A block per token, 8 outputs a thread.
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const View<float> m, const Panels from, ExpertRows rows,
                  const View<const float> weights) {
  const std::int64_t t = blockIdx.x;
  const int k = static_cast<int>(weights.cols);
  for (std::int64_t p = threadIdx.x; p < m.cols / 8; p += kThreads) {
    float sum[8] = {};
    for (int j = 0; j < k; ++j) {
      const int row = rows.row_of[t * k + j];
      if (row < 0) continue;
      const float w = weights.row(t)[j];
      const uint4 piece =
          *panel_piece(from, p / kPanelPieces, row, static_cast<int>(p % kPanelPieces));
      const auto* h = reinterpret_cast<const __half*>(&piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(w, __half2float(h[i]), sum[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) m.row(t)[p * 8 + i] = sum[i];
  }
}

}  // namespace

void sort_by_expert(const ExpertRows& rows, View<const std::int32_t> ids, std::int64_t begin,
                    std::int64_t n_expert, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(n_expert);
  check(
      cudaMemsetAsync(rows.row_of, 0xff,
                      static_cast<std::size_t>(ids.rows * ids.cols) * sizeof(std::int32_t), stream),
      "cudaMemsetAsync");
  count_kernel<<<blocks, kThreads, 0, stream>>>(rows.counts, ids, begin);
  plan_kernel<<<1, kPlanThreads, 0, stream>>>(rows, static_cast<int>(n_expert));
  place_kernel<<<blocks, kThreads, 0, stream>>>(rows, ids, begin);
  check_launch("sort_by_expert");
}

void gather_latents(Panels to, const ExpertRows& rows, View<const float> z, std::int64_t k,
                    cudaStream_t stream) {
  const auto shared = static_cast<std::size_t>(to.n_panel * kPanel) * sizeof(__half);
  gather_kernel<<<static_cast<unsigned>(z.rows), kThreads, shared, stream>>>(to, rows, z,
                                                                             static_cast<int>(k));
  check_launch("gather_kernel");
}

void reduce_experts(View<float> m, Panels from, const ExpertRows& rows, View<const float> weights,
                    cudaStream_t stream) {
  reduce_kernel<<<static_cast<unsigned>(m.rows), kThreads, 0, stream>>>(m, from, rows, weights);
  check_launch("reduce_kernel");
}

}  // namespace k3::cuda
