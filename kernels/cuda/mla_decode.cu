// Split attention over the latent cache on tensor cores, for decode. The rows of all tokens form one list of tiles of 64
// rows, cut evenly over the blocks by the positions in device memory, so a captured launch fits every position. A block
// serves all heads of a group; a second kernel joins what the blocks know of a token (mla_join.cuh).
//
// A tile is nine panels of 64 columns in a ring, brought by one thread. Scores are taken rows x heads (a row panel times the
// queries), weights go to shared memory as heads x rows, and the context is built latent x heads (a panel read transposed
// times the weights), so no head is padded beyond a multiple of 16. Where two groups of heads need the same rows, their blocks
// form a pair: each brings half of a panel and writes it to both, so that rows cross the device's network once.
//   warps  0-3   one thread copies panels
//   warps  4-7   scores, running maximum, weights, sums
//   warps  8-15  context, half of the 512 latent columns each four
#include "kernels/cuda/mla_decode.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/cuda/check.h"
#include "kernels/cuda/mla_decode.cuh"
#include "kernels/cuda/mla_join.cuh"
#include "kernels/cuda/mla_sm90.cuh"

namespace k3::cuda {
namespace {

using namespace latent;

constexpr int kThreads = 512;
constexpr float kLog2E = 1.4426950408889634f;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The maximum is moved only when it grew by this much (in powers of two): weights stay below 2^8, far inside f16.
constexpr float kLazy = 8;

// Panels in the order in which they are read, which is the order in which they are free again: the rope part serves scores
// alone, then the halves of the latent columns alternate.
__device__ constexpr int panel_at(int i) { return i == 0 ? 8 : (i - 1) % 2 * 4 + (i - 1) / 2; }

// Where the block is in the ring: the stage of the tile's panel 0, and the round's parity.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  struct At {
    int stage;
    std::uint32_t parity;
  };
  __device__ At at(int i) const {
    const bool wraps = stage + i >= kStages;
    return {stage + i - (wraps ? kStages : 0), parity ^ (wraps ? 1u : 0u)};
  }
  __device__ void next_tile() {
    const At a = at(kPanels);
    stage = a.stage;
    parity = a.parity;
  }
};

// Where things lie in shared memory, at constant addresses: the accumulators leave no registers for pointers.
extern __shared__ __align__(1024) char g_shared[];

template <class C>
struct Block {
  static constexpr int kRing = C::kQueries, kWeightsAt = kRing + C::kStages * kPanelBytes,
                       kPiecesAt = kWeightsAt + C::kWeights,
                       kFloatsAt = kPiecesAt + C::kMaxSegments * static_cast<int>(sizeof(Piece)),
                       kIntsAt = kFloatsAt + 7 * C::kHeads * 4,
                       kBarriersAt = kIntsAt + (static_cast<int>(kMlaDecodeTok) + 4) * 4;
  static_assert(kBarriersAt % 8 == 0 && kBarriersAt + 16 * C::kStages + 16 <= C::kShared);

  __device__ static std::uint32_t at(int bytes) { return address(g_shared) + bytes; }
  __device__ static std::uint32_t queries() { return at(0); }
  __device__ static std::uint32_t panel(int stage) { return at(kRing) + stage * kPanelBytes; }
  __device__ static std::uint32_t weights() { return at(kWeightsAt); }
  __device__ static std::uint32_t full(int stage) { return at(kBarriersAt) + 8 * stage; }
  __device__ static std::uint32_t empty(int stage) { return full(C::kStages) + 8 * stage; }
  __device__ static std::uint32_t weights_full() { return empty(C::kStages); }
  __device__ static std::uint32_t weights_empty() { return empty(C::kStages) + 8; }
  __device__ static Piece* pieces() { return reinterpret_cast<Piece*>(g_shared + kPiecesAt); }
  __device__ static float* floats() { return reinterpret_cast<float*>(g_shared + kFloatsAt); }
  __device__ static float* warp_top() { return floats(); }
  __device__ static float* top() { return floats() + 4 * C::kHeads; }
  __device__ static float* factor() { return floats() + 5 * C::kHeads; }
  __device__ static float* total() { return floats() + 6 * C::kHeads; }
  __device__ static int* n_row() { return reinterpret_cast<int*>(g_shared + kIntsAt); }
  __device__ static int& n_piece() { return n_row()[kMlaDecodeTok]; }
  __device__ static int& first() { return n_row()[kMlaDecodeTok + 1]; }
  __device__ static int& rescale() { return n_row()[kMlaDecodeTok + 2]; }
};

// The block's pieces, in order; false: it has none.
template <class C>
__device__ bool plan(const Args& a) {
  using B = Block<C>;
  const int tid = static_cast<int>(threadIdx.x), n_list = C::kPair ? 1 : a.n_group,
            n_segment = a.n_tok * n_list;
  if (tid < C::kStages) {
    // Empty once four warps have read a panel; in a pair also the other block's, as panels are written in both at once.
    barrier_init(B::full(tid), 1);
    barrier_init(B::empty(tid), C::kPair ? 8 : 4);
    if (tid == 0) {
      barrier_init(B::weights_full(), 1);
      barrier_init(B::weights_empty(), 8);
    }
    barrier_init_done();
  }
  wait_for_last_kernel();
  let_next_kernel_start();
  if (tid < a.n_tok) B::n_row()[tid] = static_cast<int>(a.shard.rows(a.pos[tid] + 1));
  __syncthreads();
  const Cut c = cut(B::n_row(), a.n_tok, n_list, a.n_block);
  const int block = static_cast<int>(blockIdx.x) / (C::kPair ? 2 : 1);
  const int begin = block * c.per, end = min(begin + c.per, c.total);
  if (begin >= end) return false;
  int from = 0, n_tile = 0;
  if (tid < n_segment) {
    from = first_tile(B::n_row(), tid, n_list);
    n_tile = tiles_of(B::n_row()[tid / n_list]);
    if (from <= begin && begin < from + n_tile) B::first() = tid;
  }
  __syncthreads();
  if (tid >= B::first() && tid < n_segment && from < end) {
    const int lo = max(from, begin), hi = min(from + n_tile, end), token = tid / n_list,
              group = C::kPair ? static_cast<int>(blockIdx.x) % 2 : tid % n_list,
              head0 = group * a.group_heads;
    B::pieces()[tid - B::first()] = {token,
                                     head0,
                                     min(a.group_heads, a.n_head - head0),
                                     a.slot[token],
                                     lo - from,
                                     max(0, hi - lo),
                                     B::n_row()[token],
                                     part_of<C>(block, tid, group)};
    if (from + n_tile >= end || tid + 1 == n_segment) B::n_piece() = tid - B::first() + 1;
  }
  __syncthreads();
  if constexpr (C::kPair) cluster_sync();  // the other block's barriers are ready
  return true;
}

__device__ __forceinline__ void store_16(std::uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_16(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ float exp2_fast(float v) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
  return v;
}

// The piece's queries, scaled and rounded, by warps 4 to 15; zeros for heads that are padding.
template <class C>
__device__ void load_queries(const Args& a, const Piece& p) {
  using B = Block<C>;
  using T = typename C::Row;
  constexpr int kPieces = kWidth / 8, kTurns = C::kHeads * kPieces / 384;
  static_assert(C::kHeads * kPieces % 384 == 0);
  const float *q = a.q.latent.row(p.token) + static_cast<std::int64_t>(p.head0) * kWidth,
              *rope = a.q.rope.row(p.token) + p.head0 * a.q.rope_head;
#pragma unroll  // all loads on their way at once

  for (int i = 0; i < kTurns; ++i) {
    const int at = i * 384 + static_cast<int>(threadIdx.x) - 128, h = at / kPieces,
              c = at % kPieces;
    float v[8] = {};
    if (h < p.n_head) {
      const auto* from = reinterpret_cast<const float4*>(
          c < kLatent / 8 ? q + h * kWidth + c * 8 : rope + h * a.q.rope_head + c * 8 - kLatent);
      const float4 lo = from[0], hi = from[1];
      v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
      v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
    }
    std::uint32_t out[4], rest[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float x = v[2 * k] * a.scale, y = v[2 * k + 1] * a.scale;
      out[k] = pack<T>(x, y);
      const float2 rounded = unpack<T>(out[k]);
      rest[k] = pack<T>(x - rounded.x, y - rounded.y);
    }
    const std::uint32_t to =
        B::queries() + c / 8 * C::kQueryPanel + h * 128 + (((c % 8) ^ (h & 7)) << 4);
    store_16(to, {out[0], out[1], out[2], out[3]});
    if constexpr (C::kSplit) {
      store_16(to + kPanels * C::kQueryPanel, {rest[0], rest[1], rest[2], rest[3]});
    }
  }
  fence_for_tensor_cores();
}

template <class C>
__device__ void copy_panels(const CUtensorMap& map) {
  using B = Block<C>;
  const int rank = static_cast<int>(blockIdx.x) % 2;  // in a pair
  Ring<C::kStages> ring;
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    const int slot = p.slot;
    int row = p.tile0 * kTileRows;
    for (int tile = p.n_tile; tile > 0; --tile, row += kTileRows) {
#pragma unroll
      for (int k = 0; k < kPanels; ++k) {
        const auto at = ring.at(k);
        const std::uint32_t full = B::full(at.stage), to = B::panel(at.stage);
        wait(B::empty(at.stage), at.parity ^ 1);
        arrive_expecting(full, kPanelBytes);
        if constexpr (C::kPair) {
          load_tile_to_pair(to + rank * (kPanelBytes / 2), map, panel_at(k) * 64,
                            row + rank * (kTileRows / 2), slot, full);
        } else {
          load_tile(to, map, panel_at(k) * 64, row, slot, full);
        }
      }
      ring.next_tile();
    }
  }
}

// One warp has read a panel for the last time.
template <class C>
__device__ __forceinline__ void release(int stage, int lane) {
  if constexpr (C::kPair) {
    if (lane < 2) arrive_at(Block<C>::empty(stage), lane);
  } else {
    if (lane == 0) arrive(Block<C>::empty(stage));
  }
}

// Maxima of kN columns over the eight lanes that differ in bits kBit and above; each half of the lanes keeps half of the
// columns where their number is even. Returns how many are left, in v[0 ..]; `first` is the first of them.
template <int kN, int kBit, int kAll>
__device__ __forceinline__ int column_top(float (&v)[kAll], int lane, int& first) {
  if constexpr (kBit == 2) {
    return kN;
  } else if constexpr (kN % 2 == 0) {
    const bool upper = (lane & kBit) != 0;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float send = upper ? v[i] : v[i + kN / 2], keep = upper ? v[i + kN / 2] : v[i];
      v[i] = fmaxf(keep, __shfl_xor_sync(0xffffffffu, send, kBit));
    }
    first += upper ? kN / 2 : 0;
    return column_top<kN / 2, kBit / 2>(v, lane, first);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] = fmaxf(v[i], __shfl_xor_sync(0xffffffffu, v[i], kBit));
    return column_top<kN, kBit / 2>(v, lane, first);
  }
}

constexpr int columns_left(int n) {
  for (int i = 0; i < 3; ++i) n = n % 2 == 0 ? n / 2 : n;
  return n;
}

// Rows of the tile from n_row on are no rows of this token: their values must not turn zero weights into NaN.
template <class C>
__device__ void clear_rows(const Ring<C::kStages>& ring, int n_row) {
  using B = Block<C>;
  const int tid = static_cast<int>(threadIdx.x) - 128;
  for (int k = 1; k < kPanels; ++k) {
    const std::uint32_t panel = B::panel(ring.at(k).stage);
    for (int i = n_row * 8 + tid; i < kTileRows * 8; i += 128)
      store_16(panel + i * 16, {0, 0, 0, 0});
  }
}

template <class C>
__device__ void scores(const Args& a) {
  using B = Block<C>;
  using T = typename C::Row;
  constexpr int N = C::kHeads;
  const int tid = static_cast<int>(threadIdx.x) - 128, lane = tid % 32, warp = tid / 32;
  Ring<C::kStages> ring;
  std::uint32_t weights_parity = 1;
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    if (p.n_tile == 0) continue;
    load_queries<C>(a, p);
    sync_some(2, 384);
    float top = -INFINITY, sum = 0;  // of head `tid`
    // Sums are of the rounded weights, so that rounding them favours no head.
    const auto add_weights = [&] {
      if (tid >= N) return;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const uint4 v = load_16(B::weights() + tid * 128 + ((k ^ (tid & 7)) << 4));
        for (const std::uint32_t two : {v.x, v.y, v.z, v.w}) {
          const float2 w = unpack<T>(two);
          sum += w.x + w.y;
        }
      }
    };
    for (int tile = 0; tile < p.n_tile; ++tile) {
      float s[N / 2];
#pragma unroll
      for (int k = 0; k < kPanels; ++k) {
        const auto at = ring.at(k);
        wait(B::full(at.stage), at.parity);
        mma_fence();
        const std::uint64_t rows = descriptor(B::panel(at.stage)),
                            query = descriptor(B::queries() + panel_at(k) * C::kQueryPanel);
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // 16 columns, 32 bytes, two units of a descriptor
          LatentMma<T, N>::template run<false>(s, rows + 2 * step, query + 2 * step, k + step > 0);
        }
        if constexpr (C::kSplit) {
          const std::uint64_t rest = query + (kPanels * C::kQueryPanel >> 4);
#pragma unroll
          for (int step = 0; step < 4; ++step)
            LatentMma<T, N>::template run<false>(s, rows + 2 * step, rest + 2 * step, 1);
        }
      }
      mma_commit();
      if (tile > 0) add_weights();
      mma_wait<0>();
      release<C>(ring.stage, lane);  // the rope part

      const int valid = p.n_row - (p.tile0 + tile) * kTileRows, row = warp * 16 + lane / 4;
      if (valid < kTileRows) {
        clear_rows<C>(ring, valid);
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
          if (row + (j % 4 < 2 ? 0 : 8) >= valid) s[j] = -INFINITY;
        }
      }
      float most[N / 4];
#pragma unroll
      for (int j = 0; j < N / 4; ++j)
        most[j] = fmaxf(s[j / 2 * 4 + j % 2], s[j / 2 * 4 + 2 + j % 2]);
      int column = 0;
      column_top<N / 4, 16>(most, lane, column);
#pragma unroll
      for (int j = 0; j < columns_left(N / 4); ++j) {
        const int c = column + j;
        B::warp_top()[warp * N + c / 2 * 8 + lane % 4 * 2 + c % 2] = most[j];
      }
      sync_some(1, 128);
      wait(B::weights_empty(),
           weights_parity);  // the last tile's weights and factors have been read
      weights_parity ^= 1;
      bool moved = false;
      if (tid < N) {
        float tile_top = B::warp_top()[tid];
        for (int w = 1; w < 4; ++w) tile_top = fmaxf(tile_top, B::warp_top()[w * N + tid]);
        float factor = 1;
        if (tile == 0) {
          top = tile_top;
        } else if (tile_top > top + kLazy) {
          factor = exp2_fast(top - tile_top);
          top = tile_top;
          sum *= factor;
          moved = true;
        }
        B::top()[tid] = top;
        B::factor()[tid] = factor;
      }
      moved = any_of_some(1, 128, moved);
      if (tid == 0) B::rescale() = moved ? 1 : 0;
#pragma unroll
      for (int j = 0; j < N / 8; j += 2) {
        std::uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float2 m = *reinterpret_cast<const float2*>(B::top() + (j + k) * 8 + lane % 4 * 2);
          const float* x = s + (j + k) * 4;
          w[2 * k] = pack<T>(exp2_fast(x[0] - m.x), exp2_fast(x[1] - m.y));
          w[2 * k + 1] = pack<T>(exp2_fast(x[2] - m.x), exp2_fast(x[3] - m.y));
        }
        const int head = (j + lane / 16) * 8 + lane % 8, eight = warp * 2 + lane / 8 % 2;
        store_transposed(B::weights() + head * 128 + ((eight ^ (head & 7)) << 4), w[0], w[1], w[2],
                         w[3]);
      }
      fence_for_tensor_cores();
      sync_some(1, 128);
      if (tid == 0) arrive(B::weights_full());
      ring.next_tile();
    }
    add_weights();
    if (tid < N) {
      B::total()[tid] = sum;
      a.stats[static_cast<std::int64_t>(p.part) * 2 * N + tid] = top;
      a.stats[(static_cast<std::int64_t>(p.part) * 2 + 1) * N + tid] = sum;
    }
    arrive_some(3, 384);
  }
}

// acc: latent columns 64 * (4 * half + m) ... of all heads.
template <class C>
__device__ void finish(const Args& a, const Piece& p, int half,
                       const float (&acc)[4][C::kHeads / 2]) {
  constexpr int N = C::kHeads;
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float* total = Block<C>::total() + j * 8 + lane % 4 * 2;
    const float s0 = 1.0f / total[0], s1 = 1.0f / total[1];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* v = acc[m] + j * 4;
      const float x = v[0] * s0, y = v[1] * s1, z = v[2] * s0, w = v[3] * s1;
      const std::int64_t at =
          (((static_cast<std::int64_t>(p.part) * 8 + half * 4 + m) * 4 + warp) * (N / 8) + j) * 32 +
          lane;
      auto* to = reinterpret_cast<typename C::Four*>(a.values) + at;
      if constexpr (sizeof(typename C::Four) == 8) {
        *to = {pack<__half>(x, y), pack<__half>(z, w)};
      } else {
        *to = {x, y, z, w};
      }
    }
  }
}

template <class C>
__device__ void context(const Args& a, int half) {
  using B = Block<C>;
  using T = typename C::Row;
  constexpr int N = C::kHeads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<C::kStages> ring;
  std::uint32_t weights_parity = 0;
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    if (p.n_tile == 0) continue;
    load_queries<C>(a, p);
    sync_some(2, 384);
    float acc[4][N / 2];
    for (int tile = 0; tile < p.n_tile; ++tile) {
      wait(B::weights_full(), weights_parity);
      weights_parity ^= 1;
      if (tile > 0 && *static_cast<volatile int*>(&B::rescale()) != 0) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          const float2 f = *reinterpret_cast<const float2*>(B::factor() + j * 8 + lane % 4 * 2);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            acc[m][j * 4] *= f.x, acc[m][j * 4 + 1] *= f.y;
            acc[m][j * 4 + 2] *= f.x, acc[m][j * 4 + 3] *= f.y;
          }
        }
      }
      const std::uint64_t weights = descriptor(B::weights());
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const auto at = ring.at(1 + 2 * m + half);
        wait(B::full(at.stage), at.parity);
        mma_fence();
        const std::uint64_t values = descriptor(B::panel(at.stage));
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // 16 rows
          LatentMma<T, N>::template run<true>(acc[m], values + (step * 2048 >> 4),
                                              weights + 2 * step, tile > 0 || step > 0);
        }
        mma_commit();
      }
      mma_wait<3>();
      release<C>(ring.at(1 + half).stage, lane);
      mma_wait<2>();
      release<C>(ring.at(3 + half).stage, lane);
      mma_wait<1>();
      release<C>(ring.at(5 + half).stage, lane);
      mma_wait<0>();
      release<C>(ring.at(7 + half).stage, lane);
      if (lane == 0) arrive(B::weights_empty());
      ring.next_tile();
    }
    sync_some(3, 384);
    finish<C>(a, p, half, acc);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 0) prefetch_map(map);
  if (!plan<C>(args)) return;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    set_registers<C::kCopyRegs>();
    if (threadIdx.x == 0) copy_panels<C>(map);
  } else if (group == 1) {
    set_registers<C::kScoreRegs>();
    scores<C>(args);
  } else {
    set_registers<C::kContextRegs>();
    context<C>(args, group - 2);
  }
  // The other block of a pair may still write here and arrive at barriers here.
  if constexpr (C::kPair) cluster_sync();
#endif
}

CUtensorMap tile_map(const MlaCache& cache, unsigned n_row) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) {
      throw DeviceError("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  constexpr cuuint64_t kRow = kWidth * 2, kSlots = 1 << 16;  // more slots than anyone has
  const cuuint64_t n_ctx = static_cast<cuuint64_t>(cache.n_ctx);
  // Rows beyond a slot's last are read as zeros.
  const cuuint64_t dims[] = {kWidth, n_ctx, kSlots}, strides[] = {kRow, n_ctx * kRow};
  const cuuint32_t box[] = {64, n_row, 1}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map,
             cache.type == CacheType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             3, cache.rows, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError("cuTensorMapEncodeTiled: error " + std::to_string(status) + " for " +
                      std::to_string(cache.n_ctx) + " rows a slot");
  }
  return map;
}

// A kernel that may start while the one before it in the stream still runs; it waits for that one's end itself.
template <class... Parameters>
void launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
                  int shared, int cluster, cudaStream_t stream, const Parameters&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

template <class C>
void launch(const MlaCache& cache, Args args, int n_block, std::byte* scratch,
            std::size_t scratch_bytes, cudaStream_t stream) {
  constexpr int N = C::kHeads, kPair = C::kPair ? 2 : 1;
  constexpr std::size_t kStats = 2 * N * sizeof(float),
                        kValues = N * kLatent / 4 * sizeof(typename C::Four);
  const int n_segment = args.n_tok * (C::kPair ? 1 : args.n_group),
            fit = static_cast<int>(
                std::min<std::size_t>(scratch_bytes / (kStats + kValues) / kPair, 4096));
  args.n_block = std::min(n_block / kPair, fit - n_segment);
  if (args.n_block < 1) {
    throw std::invalid_argument("mla_decode: " + std::to_string(scratch_bytes) +
                                " bytes of scratch for " + std::to_string(n_segment) + " segments");
  }
  args.values = scratch;
  args.stats = reinterpret_cast<float*>(
      scratch + static_cast<std::size_t>((args.n_block + n_segment) * kPair) * kValues);
  check(cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             C::kShared),
        "cudaFuncSetAttribute");
  launch_early("decode_kernel", decode_kernel<C>, dim3(static_cast<unsigned>(args.n_block * kPair)),
               kThreads, C::kShared, kPair, stream, tile_map(cache, kTileRows / kPair), args);
  launch_early("join_parts_kernel", join_parts_kernel<C>,
               dim3(kLatent / 16, N / 8, static_cast<unsigned>(args.n_tok * args.n_group)),
               kJoinThreads<C>, 0, 1, stream, args);
}

}  // namespace

bool has_mla_decode() {
#ifdef K3_SM90A
  return true;
#else
  return false;
#endif
}

MlaShape mla_shape(const MlaQueries& q, std::int64_t n_head, const MlaCache& cache,
                   const BatchView& batch, int cc) {
  const auto on_16 = [](const View<const float>& v) {
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.stride % 4 == 0;
  };
  const bool aligned = on_16(q.latent) && on_16(q.rope) && q.rope_head % 4 == 0 &&
                       reinterpret_cast<std::uintptr_t>(cache.rows) % 16 == 0;
  return {cache.type, cache.kv_latent,  cache.rope, n_head, batch.n_tok,
          cc,         has_mla_decode(), aligned};
}

void mla_decode(MlaOut out, const MlaQueries& q, float scale, const MlaCache& cache,
                const BatchView& batch, const MlaChoice& choice, int n_head, int n_block,
                std::byte* scratch, std::size_t scratch_bytes, cudaStream_t stream) {
  if (batch.n_tok == 0) return;
  const Args args{out,
                  q,
                  scale * kLog2E,
                  batch.pos,
                  batch.slot,
                  cache.shard,
                  static_cast<int>(batch.n_tok),
                  n_head,
                  choice.n_group,
                  choice.group_heads,
                  0,
                  nullptr,
                  nullptr};
  const auto run = [&]<class T, int N, bool kSplit, bool kPair>() {
    launch<Config<T, N, kSplit, kPair>>(cache, args, n_block, scratch, scratch_bytes, stream);
  };
  const auto run_type = [&]<class T, bool kSplit>() {
    if (choice.pair) return run.template operator()<T, 48, kSplit, true>();
    if (choice.tile_heads == 16) return run.template operator()<T, 16, kSplit, false>();
    if (choice.tile_heads == 32) return run.template operator()<T, 32, kSplit, false>();
    run.template operator()<T, 48, kSplit, false>();
  };
  if (choice.split_q) {
    run_type.template operator()<__nv_bfloat16, true>();
  } else {
    run_type.template operator()<__half, false>();
  }
}

}  // namespace k3::cuda
