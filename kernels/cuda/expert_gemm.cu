// The grouped product of routed experts. A block takes 256 weight rows of one expert (gate and up rows side by side, or
// rows of down) against up to 96 of its tokens. Weights are the first operand, decoded from their blocks into registers
// while the tensor cores work on the step before; tokens are the second, copied into a ring of shared memory.
#include "kernels/cuda/check.h"
#include "kernels/cuda/expert_gemm.h"
#include "kernels/cuda/iq1s_octets.cuh"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/prefill_math.cuh"

namespace k3::cuda {
namespace {

constexpr int kStages = 6;
constexpr int kThreads = 384;  // a warpgroup that copies, two that multiply
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

__device__ __forceinline__ int columns_of(int n) {
  return n <= 32 ? 32 : n <= 64 ? 64 : n <= 80 ? 80 : kMaxTile;
}

struct Ports {
  char *x, *staging;
  std::uint64_t *full, *empty;
};

// The weight row of matrix half b, row i of this group's 64.
template <bool kGated>
__device__ __forceinline__ std::int64_t weight_row(int row_tile, int group, int b, int i) {
  if constexpr (kGated) return element_of_slot((row_tile * 2 + group) * kPanel + i);
  return (row_tile * 2 + group) * 128 + b * 64 + i;
}

// One of the 256 weight rows of an item, to L2: a lane takes rows lane, lane + 32, ... as `part` goes from 0 to 7.
template <bool kGated>
__device__ __forceinline__ void prefetch_rows(const Grouped& g, int item, int n_item, int part) {
  if (item >= n_item) return;
  const int expert = g.rows.tiles[item / g.row_tiles].x, lane = threadIdx.x % 32;
  const Weight& w = g.w[part % 2];
  const std::int64_t row =
      weight_row<kGated>(item % g.row_tiles, part / 4, part % 2, part / 2 % 2 * 32 + lane);
  if (row < w.n_out)
    bulk_prefetch(w.data + expert * w.mat_bytes + row * w.row_bytes,
                  static_cast<std::uint32_t>(w.row_bytes));
}

// By one warp: tokens into the ring, and the weights of the next item on their way.
template <bool kGated>
__device__ __forceinline__ void copy_tokens(const Grouped& g, const Ports& p) {
  const char* x = reinterpret_cast<const char*>(g.x.data);
  const int n_item = *g.rows.n_tile * g.row_tiles, n_panel = static_cast<int>(g.x.n_panel),
            every = max(n_panel / 8, 1);
  Ring<kStages> ring;
  for (int i = static_cast<int>(blockIdx.x); i < n_item; i += static_cast<int>(gridDim.x)) {
    const int4 tile = g.rows.tiles[i / g.row_tiles];
    const auto bytes = static_cast<std::uint32_t>(columns_of(tile.z) * kPanelRow);
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

// acc[b] = this group's 64 rows of half b against kN tokens.
template <class Decoder, bool kGated, int kN>
__device__ __forceinline__ void multiply(const Grouped& g, const Ports& p, Ring<kStages>& ring,
                                         int expert, int row_tile, int group, float (&acc0)[kN / 2],
                                         float (&acc1)[kN / 2]) {
  const int lane = threadIdx.x % 32, i0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const Decoder decoder(g.w[0]);
  typename Decoder::Row row[2][2];
  typename Decoder::Packed next[2][2];
  const std::int64_t k0 = lane % 4 * 32;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[b][r] = Decoder::row(g.w[b], expert, weight_row<kGated>(row_tile, group, b, i0 + 8 * r));
      next[b][r] = decoder.load(row[b][r], k0);
    }
  }
  const std::int64_t n_k = g.x.n_panel * kPanel;
  int before = -1;
  for (std::int64_t k = 0; k < n_k; k += kSlotBlock) {
    typename Decoder::Packed now[2][2];
    typename Decoder::Scale scale[2][2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        now[b][r] = next[b][r];
        scale[b][r] = Decoder::scale(now[b][r]);
        if (k + kSlotBlock < n_k) next[b][r] = decoder.load(row[b][r], k + kSlotBlock + k0);
      }
    }
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      std::uint32_t f[2][2][4];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int r = 0; r < 2; ++r) Decoder::octet(now[b][r], scale[b][r], o, f[b][r]);
      }
      if (o % 2 == 0) barrier_wait(&p.full[ring.stage], ring.parity);
      const std::uint64_t x = operand(p.x + ring.stage * kStageBytes) + o % 2 * 4;
      mma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        Wgmma<kN>::rs(acc0, f[0][0][2 * step], f[0][1][2 * step], f[0][0][2 * step + 1],
                      f[0][1][2 * step + 1], x + 2 * step);
        Wgmma<kN>::rs(acc1, f[1][0][2 * step], f[1][1][2 * step], f[1][0][2 * step + 1],
                      f[1][1][2 * step + 1], x + 2 * step);
      }
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
  hold(acc0);
  hold(acc1);
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

// value(index of a sum, token) of this group's 64 rows, turned round through shared memory into rows of an output panel.
template <int kN, class Value>
__device__ __forceinline__ void store_panel(const Panels& out, std::int64_t panel, const int4& tile,
                                            char* staging, int group, const Value& value) {
  const int lane = threadIdx.x % 32, i0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
  if (threadIdx.x % 128 == 0) bulk_store_wait();
  group_sync(group);
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = 8 * j + lane % 4 * 2 + e % 2, i = i0 + e / 2 * 8;
      const float v = finite_half(value(4 * j + e, n));
      *reinterpret_cast<__half*>(staging + n * kPanelRow + ((i / 8 ^ (n & 7)) << 4) + i % 8 * 2) =
          __float2half_rn(v);
    }
  }
  publish_shared();
  group_sync(group);
  if (threadIdx.x % 128 == 0 && panel < out.n_panel) {
    bulk_store(reinterpret_cast<char*>(out.data) + (panel * out.rows + tile.y) * kPanelRow, staging,
               static_cast<std::uint32_t>((tile.z + 7) / 8 * 8 * kPanelRow));
  }
}

template <class Decoder, bool kGated, int kN>
__device__ __forceinline__ void one_item(const Grouped& g, const Ports& p, Ring<kStages>& ring,
                                         const int4& tile, int row_tile, int group) {
  float acc0[kN / 2], acc1[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc0[i] = acc1[i] = 0;
  multiply<Decoder, kGated, kN>(g, p, ring, tile.x, row_tile, group, acc0, acc1);
  char* staging = p.staging + group * 2 * kStagingBytes;
  const std::int64_t part = row_tile * 2 + group;
  if constexpr (kGated) {
    const float* scale = g.rows.scale + tile.y;
    const float per_beta = 1.0f / g.situ.beta, per_lambda = 1.0f / g.situ.lambda;
    store_panel<kN>(g.out, part, tile, staging, group, [&](int i, int n) {
      const float s = n < tile.z ? scale[n] * Decoder::kFactor : 0.0f;
      return situ_value(acc0[i] * s, acc1[i] * s, g.situ, per_beta, per_lambda) * g.out_scale;
    });
  } else {
    const float factor = g.out_scale * Decoder::kFactor;
    store_panel<kN>(g.out, part * 2, tile, staging, group,
                    [&](int i, int) { return acc0[i] * factor; });
    store_panel<kN>(g.out, part * 2 + 1, tile, staging + kStagingBytes, group,
                    [&](int i, int) { return acc1[i] * factor; });
  }
}

template <class Decoder, bool kGated>
__device__ __forceinline__ void multiply_items(const Grouped& g, const Ports& p, int group) {
  const int n_item = *g.rows.n_tile * g.row_tiles;
  Ring<kStages> ring;
  for (int i = static_cast<int>(blockIdx.x); i < n_item; i += static_cast<int>(gridDim.x)) {
    const int4 tile = g.rows.tiles[i / g.row_tiles];
    const int row_tile = i % g.row_tiles;
    switch (columns_of(tile.z)) {
      case 32:
        one_item<Decoder, kGated, 32>(g, p, ring, tile, row_tile, group);
        break;
      case 64:
        one_item<Decoder, kGated, 64>(g, p, ring, tile, row_tile, group);
        break;
      case 80:
        one_item<Decoder, kGated, 80>(g, p, ring, tile, row_tile, group);
        break;
      default:
        one_item<Decoder, kGated, kMaxTile>(g, p, ring, tile, row_tile, group);
    }
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
      barrier_init(&p.empty[i], 2);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x / 128) - 1;
  if (group < 0) {
    fewer_registers<40>();
    if (threadIdx.x < 32) copy_tokens<kGated>(g, p);
  } else {
    more_registers<232>();
    multiply_items<Decoder, kGated>(g, p, group);
    // The last stores read shared memory that goes with the block.
    if (threadIdx.x % 128 == 0) bulk_store_wait();
  }
#endif
}

template <bool kGated>
void launch(Grouped& g, cudaStream_t stream) {
  auto run = [&]<class Decoder>() {
    allow_shared(grouped_kernel<Decoder, kGated>, kShared);
    grouped_kernel<Decoder, kGated>
        <<<static_cast<unsigned>(processors()), kThreads, kShared, stream>>>(g);
  };
  run.template operator()<Iq1sOctets>();
  check_launch("grouped_kernel");
}

}  // namespace

void experts_in(Panels hidden, Panels x, const ExpertRows& rows, const Weight& gate,
                const Weight& up, Situ situ, float out_scale, cudaStream_t stream) {
  Grouped g{{gate, up}, x, hidden, rows, static_cast<int>(hidden.n_panel / 2), situ, out_scale};
  launch<true>(g, stream);
}

void experts_out(Panels out, Panels hidden, const ExpertRows& rows, const Weight& down,
                 float out_scale, cudaStream_t stream) {
  const auto row_tiles = static_cast<int>((down.n_out + 255) / 256);
  Grouped g{{down, down}, hidden, out, rows, row_tiles, {}, out_scale};
  launch<false>(g, stream);
}

}  // namespace k3::cuda
