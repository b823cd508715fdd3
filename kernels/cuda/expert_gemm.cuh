// The grouped product of routed experts. A block takes 256 weight rows of one expert (gate and up rows side by side, or
// rows of down) against up to 96 of its tokens. Weights are the first operand, decoded from their blocks into registers
// while the tensor cores work on the step before; tokens are the second, copied into a ring of shared memory.
//
// A Decoder says how a thread comes to its weights of a step, from a file's type or one of our layouts:
//   Row row(w, mat, r)              a row, or nothing where r is past the matrix: zeros
//   Packed load(row, i)             elements [i, i + 32), as they come: loaded ahead, not to be touched yet
//   Scale scale(packed)             once they are needed
//   octet(packed, scale, o, f)      octet o of the four, in pairs, in the order of element_of_slot()
//   kFactor                         weight = decoded value * kFactor
#pragma once

#include "kernels/cuda/check.h"
#include "kernels/cuda/expert_gemm.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/prefill_math.cuh"

namespace k3::cuda {
namespace {

constexpr int kStages = 6;
constexpr int kGroups = 4;     // warpgroups that multiply, 64 weight rows each
constexpr int kThreads = 640;  // and one that copies
constexpr int kStageBytes = kMaxTile * kPanelRow;
constexpr int kStagingBytes = kMaxTile * kPanelRow;  // one output panel
constexpr std::size_t kShared = 1024 + kStages * kStageBytes + 4 * kStagingBytes + 2 * kStages * 8;

struct Grouped {
  Weight w[2];  // gate and up; down twice
  Panels x, out;
  ExpertRows rows;
  int row_tiles = 0;
  Situ situ;
  float out_scale = 1;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Columns of the tensor core instruction that takes n tokens.
template <class Decoder>
__device__ __forceinline__ int columns_of(int n) {
  if constexpr (!Decoder::kFast) return kMaxTile;  // one width: the program stays small
  return n <= 32 ? 32 : n <= 64 ? 64 : n <= 80 ? 80 : kMaxTile;
}

struct Ports {
  char *x, *staging;
  std::uint64_t *full, *empty;
};

// Which weight a thread's row r (of its two, 8 apart) is. Gate and up of one feature are the two rows of one thread, so that
// situ needs no exchange: an item is 128 features of both, in slot order, or 256 rows of down.
struct WeightRow {
  int matrix;
  std::int64_t row;
};
template <bool kGated>
__device__ __forceinline__ WeightRow weight_row(int row_tile, int group, int r) {
  const int warp = threadIdx.x % 128 / 32, at = threadIdx.x % 32 / 4;
  if constexpr (kGated) return {r, element_of_slot(row_tile * 128 + group * 32 + warp * 8 + at)};
  return {0, row_tile * 256 + group * 64 + warp * 16 + at + 8 * r};
}

// Weight rows of an item to L2: a lane takes one as `part` goes from 0 to 7.
template <bool kGated>
__device__ __forceinline__ void prefetch_rows(const Grouped& g, int item, int n_item, int part) {
  if (item >= n_item) return;
  const int expert = g.rows.tiles[item / g.row_tiles].x, row_tile = item % g.row_tiles,
            lane = threadIdx.x % 32;
  const Weight& w = g.w[kGated ? part % 2 : 0];
  const std::int64_t row = kGated ? element_of_slot(row_tile * 128 + part / 2 * 32 + lane)
                                  : row_tile * 256 + part * 32 + lane;
  if (row < w.n_out)
    bulk_prefetch(w.data + expert * w.mat_bytes + row * w.row_bytes,
                  static_cast<std::uint32_t>(w.row_bytes));
}

// By one warp: tokens into the ring, and the weights of the next item on their way.
template <class Decoder, bool kGated>
__device__ __forceinline__ void copy_tokens(const Grouped& g, const Ports& p) {
  const char* x = reinterpret_cast<const char*>(g.x.data);
  const int n_item = *g.rows.n_tile * g.row_tiles, n_panel = static_cast<int>(g.x.n_panel),
            every = max(n_panel / 8, 1);
  Ring<kStages> ring;
  for (int i = static_cast<int>(blockIdx.x); i < n_item; i += static_cast<int>(gridDim.x)) {
    const int4 tile = g.rows.tiles[i / g.row_tiles];
    const auto bytes = static_cast<std::uint32_t>(columns_of<Decoder>(tile.z) * kPanelRow);
    for (int k = 0; k < n_panel; ++k) {
      if (k % every == 0 && k / every < 8)
        prefetch_rows<kGated>(g, i + static_cast<int>(gridDim.x), n_item, k / every);
      if (threadIdx.x == 0) {
        barrier_wait(&p.empty[ring.stage], ring.parity ^ 1);
        barrier_expect(&p.full[ring.stage], bytes);
        bulk_load(p.x + ring.stage * kStageBytes, x + (k * g.x.rows + tile.y) * kPanelRow, bytes,
                  &p.full[ring.stage]);
      }
      __syncwarp();
      ring.next();
    }
  }
}

// acc = this group's 64 weight rows against kN tokens.
template <class Decoder, bool kGated, int kN>
__device__ __forceinline__ void multiply(const Grouped& g, const Ports& p, Ring<kStages>& ring,
                                         int expert, int row_tile, int group,
                                         float (&acc)[kN / 2]) {
  const Decoder decoder(g.w[0]);
  typename Decoder::Row row[2];
  typename Decoder::Packed next[2];
  const std::int64_t k0 = threadIdx.x % 4 * 32, n_k = g.x.n_panel * kPanel;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const WeightRow at = weight_row<kGated>(row_tile, group, r);
    row[r] = Decoder::row(g.w[at.matrix], expert, at.row);
    next[r] = decoder.load(row[r], k0);
  }
  int before = -1;
  for (std::int64_t k = 0; k < n_k; k += kSlotBlock) {
    typename Decoder::Packed now[2];
    typename Decoder::Scale scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = next[r];
      scale[r] = Decoder::scale(now[r]);
      if (k + kSlotBlock < n_k) next[r] = decoder.load(row[r], k + kSlotBlock + k0);
    }
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      std::uint32_t f[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) Decoder::octet(now[r], scale[r], o, f[r]);
      if (o % 2 == 0) barrier_wait(&p.full[ring.stage], ring.parity);
      const std::uint64_t x = operand(p.x + ring.stage * kStageBytes) + o % 2 * 4;
      mma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
        Wgmma<kN>::rs(acc, f[0][2 * step], f[1][2 * step], f[0][2 * step + 1], f[1][2 * step + 1],
                      x + 2 * step);
      mma_commit();
      mma_wait<1>();
      if (o % 2 == 0) {
        if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(&p.empty[before]);
        before = ring.stage;
      } else {
        ring.next();
      }
    }
  }
  mma_wait<0>();
  hold(acc);
  if (threadIdx.x % 128 == 0) barrier_arrive(&p.empty[before]);
}

// Good to 1e-6 of the largest value, which f16 then rounds to 5e-4 of its own.
__device__ __forceinline__ float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ __forceinline__ float fast_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + __expf(fminf(2.0f * x, 60.0f)));
}
__device__ __forceinline__ float situ_value(float g, float u, const Situ& p, float per_beta,
                                            float per_lambda) {
  const float gate = p.beta * fast_tanh(g * per_beta) * fast_sigmoid(g);
  return gate * (p.lambda > 0 ? p.lambda * fast_tanh(u * per_lambda) : u);
}

// Sums to rows of output panels, turned round through shared memory. Gated: two groups fill one panel, a thread one feature of
// it; else a group fills its own.
template <class Decoder, bool kGated, int kN>
__device__ __forceinline__ void store_sums(const Grouped& g, const Ports& p, const int4& tile,
                                           int row_tile, int group, const float (&acc)[kN / 2]) {
  constexpr int kShare = kGated ? 2 : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, team = group / kShare;
  const bool leads = group % kShare == 0 && threadIdx.x % 128 == 0;
  char* staging = p.staging + team * kStagingBytes;
  const auto put = [&](int n, int i, float v) {
    *reinterpret_cast<__half*>(staging + n * kPanelRow + ((i / 8 ^ (n & 7)) << 4) + i % 8 * 2) =
        __float2half_rn(finite_half(v));
  };
  if (leads) bulk_store_wait();
  team_sync(team, 128 * kShare);
  const float factor = g.out_scale * Decoder::kFactor, per_beta = 1.0f / g.situ.beta,
              per_lambda = 1.0f / g.situ.lambda;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = 8 * j + lane % 4 * 2 + e;
      const float a = acc[4 * j + e], b = acc[4 * j + 2 + e];
      if constexpr (kGated) {
        const float s = n < tile.z ? g.rows.scale[tile.y + n] * Decoder::kFactor : 0.0f;
        put(n, group % 2 * 32 + warp * 8 + lane / 4,
            situ_value(a * s, b * s, g.situ, per_beta, per_lambda) * g.out_scale);
      } else {
        put(n, warp * 16 + lane / 4, a * factor);
        put(n, warp * 16 + lane / 4 + 8, b * factor);
      }
    }
  }
  publish_shared();
  team_sync(team, 128 * kShare);
  const std::int64_t panel = row_tile * (kGroups / kShare) + team;
  if (leads && panel < g.out.n_panel) {
    bulk_store(reinterpret_cast<char*>(g.out.data) + (panel * g.out.rows + tile.y) * kPanelRow,
               staging, static_cast<std::uint32_t>((tile.z + 7) / 8 * 8 * kPanelRow));
  }
}

template <class Decoder, bool kGated, int kN>
__device__ __forceinline__ void one_item(const Grouped& g, const Ports& p, Ring<kStages>& ring,
                                         const int4& tile, int row_tile, int group) {
  float acc[kN / 2];
#pragma unroll
  for (float& v : acc) v = 0;
  multiply<Decoder, kGated, kN>(g, p, ring, tile.x, row_tile, group, acc);
  store_sums<Decoder, kGated, kN>(g, p, tile, row_tile, group, acc);
}

template <class Decoder, bool kGated>
__device__ __forceinline__ void multiply_items(const Grouped& g, const Ports& p, int group) {
  const int n_item = *g.rows.n_tile * g.row_tiles;
  Ring<kStages> ring;
  for (int i = static_cast<int>(blockIdx.x); i < n_item; i += static_cast<int>(gridDim.x)) {
    const int4 tile = g.rows.tiles[i / g.row_tiles];
    const int row_tile = i % g.row_tiles;
    if constexpr (Decoder::kFast) {
      switch (columns_of<Decoder>(tile.z)) {
        case 32:
          one_item<Decoder, kGated, 32>(g, p, ring, tile, row_tile, group);
          continue;
        case 64:
          one_item<Decoder, kGated, 64>(g, p, ring, tile, row_tile, group);
          continue;
        case 80:
          one_item<Decoder, kGated, 80>(g, p, ring, tile, row_tile, group);
          continue;
      }
    }
    one_item<Decoder, kGated, kMaxTile>(g, p, ring, tile, row_tile, group);
  }
}

#endif

template <class Decoder, bool kGated>
__global__ void __launch_bounds__(kThreads, 1) grouped_kernel(const __grid_constant__ Grouped g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  char* base = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
  char* staging = base + kStages * kStageBytes;
  auto* full = reinterpret_cast<std::uint64_t*>(staging + 4 * kStagingBytes);
  const Ports p{base, staging, full, full + kStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&p.full[i], 1);
      barrier_init(&p.empty[i], kGroups);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x / 128) - 1;
  if (group < 0) {
    fewer_registers<32>();
    if (threadIdx.x < 32) copy_tokens<Decoder, kGated>(g, p);
  } else {
    more_registers<120>();
    multiply_items<Decoder, kGated>(g, p, group);
    // The last stores read shared memory that goes with the block.
    if (threadIdx.x % 128 == 0) bulk_store_wait();
  }
#endif
}

template <class Decoder>
void launch_grouped(const Grouped& g, bool gated, cudaStream_t stream) {
  const auto run = [&]<bool kGated>() {
    allow_shared(grouped_kernel<Decoder, kGated>, kShared);
    grouped_kernel<Decoder, kGated>
        <<<static_cast<unsigned>(processors()), kThreads, kShared, stream>>>(g);
  };
  gated ? run.template operator()<true>() : run.template operator()<false>();
  check_launch("grouped_kernel");
}

}  // namespace

}  // namespace k3::cuda
