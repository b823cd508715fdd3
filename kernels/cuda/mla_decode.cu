// Split attention over the latent cache on tensor cores, for decode. The rows of all tokens form one list of tiles of 64
// rows, cut evenly over the blocks by the positions in device memory, so a captured launch fits every position. A block
// serves all heads of a group; what it knows of a token it did not finish is joined by a second kernel.
//
// A tile is nine panels of 64 columns in a ring, brought by one thread. Scores are taken rows x heads (a row panel times the
// queries), weights go to shared memory as heads x rows, and the context is built latent x heads (a panel read transposed
// times the weights): rows are read once from device memory and no head is padded beyond a multiple of 16.
//   warps  0-3   one thread copies panels
//   warps  4-7   scores, running maximum, weights, sums
//   warps  8-15  context, half of the 512 latent columns each four
#include "kernels/cuda/mla_decode.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/mla_sm90.cuh"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kTileRows = 64;
constexpr int kLatent = 512, kWidth = 576;
constexpr int kPanels = 9;                    // of 64 columns: eight latent ones and the rope part
constexpr int kPanelBytes = kTileRows * 128;  // of 64 rows
constexpr int kMinTiles = 2;      // of a block: below that, joining costs more than it gains
constexpr int kMostPieces = 256;  // of a segment
constexpr int kSharedMost = 227 * 1024;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// The maximum is moved only when it grew by this much (in powers of two): weights stay below 2^8, far inside f16.
constexpr float kLazy = 8;

// Rows of one token that one block reads.
struct Piece {
  int token, head0, n_head, slot;
  int tile0, n_tile, n_row;  // n_row: of the token in all, from its row 0
  int part;                  // where the block's result goes; -1: the block has all rows
};

struct Args {
  MlaOut out;
  View<const float> q;
  float scale;  // times log2 e
  const std::int32_t* pos;
  const std::int32_t* slot;
  RowShard shard;
  int n_tok, n_head, n_group, group_heads, n_block;
  std::byte* values;  // [n_block + n_segment] of the block's context, in the order of its registers
  float* stats;       // [n_block + n_segment][2][tile heads]: maximum (powers of two), sum
};

template <class T, int N, bool kSplit>
struct Config {
  static constexpr int kHeads = N;
  static constexpr int kQueryPanel = N * 128;
  static constexpr int kQueries = (kSplit ? 2 : 1) * kPanels * kQueryPanel;
  static constexpr int kWeights = N * 128;
  static constexpr int kMaxSegments = (kSplit ? 3 : 2) * static_cast<int>(kMlaDecodeTok);
  static constexpr int kRest =
      7 * N * 4 + kMaxSegments * static_cast<int>(sizeof(Piece)) + 1024;  // lists, flags, barriers
  static constexpr int kRoom = kSharedMost - kQueries - kWeights - kRest;
  static constexpr int kStages = std::min(24, kRoom / kPanelBytes);
  static constexpr int kShared = kQueries + kWeights + kRest + kStages * kPanelBytes;
  // Of a thread, by role; 512 together.
  static constexpr int kCopyRegs = 24;
  static constexpr int kContextRegs = 168;
  static constexpr int kScoreRegs = 512 - kCopyRegs - 2 * kContextRegs;
  // A combination of f16 values with weights that sum to one is itself in f16's range; bf16's is wider.
  using Value = std::conditional_t<std::is_same_v<T, __half>, __half, float>;
  static_assert(kStages >= kPanels + 2);
};

// How the list of tiles is cut; the same in both kernels.
struct Cut {
  int per = 1;  // tiles of a block
  int total = 0;
};
__host__ __device__ inline int tiles_of(std::int64_t n_row) {
  return static_cast<int>((n_row + kTileRows - 1) / kTileRows);
}
__device__ inline Cut cut(const int* n_row, int n_tok, int n_group, int n_block) {
  Cut c;
  for (int t = 0; t < n_tok; ++t) c.total += tiles_of(n_row[t]) * n_group;
  c.per = max(kMinTiles, (c.total + n_block - 1) / n_block);
  return c;
}
__device__ inline int first_tile(const int* n_row, int segment, int n_group) {
  const int token = segment / n_group;
  int before = 0;
  for (int t = 0; t < token; ++t) before += tiles_of(n_row[t]) * n_group;
  return before + segment % n_group * tiles_of(n_row[token]);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using namespace latent;

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
  const int tid = static_cast<int>(threadIdx.x), n_segment = a.n_tok * a.n_group;
  if (tid < a.n_tok) B::n_row()[tid] = static_cast<int>(a.shard.rows(a.pos[tid] + 1));
  if (tid == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(B::full(s), 1);
      barrier_init(B::empty(s), 4);
    }
    barrier_init(B::weights_full(), 1);
    barrier_init(B::weights_empty(), 8);
    barrier_init_done();
  }
  __syncthreads();
  const Cut c = cut(B::n_row(), a.n_tok, a.n_group, a.n_block);
  const int begin = static_cast<int>(blockIdx.x) * c.per, end = min(begin + c.per, c.total);
  if (begin >= end) return false;
  int from = 0, n_tile = 0;
  if (tid < n_segment) {
    from = first_tile(B::n_row(), tid, a.n_group);
    n_tile = tiles_of(B::n_row()[tid / a.n_group]);
    if (from <= begin && begin < from + n_tile) B::first() = tid;
  }
  __syncthreads();
  if (tid >= B::first() && tid < n_segment && from < end) {
    const int lo = max(from, begin), hi = min(from + n_tile, end), token = tid / a.n_group,
              head0 = tid % a.n_group * a.group_heads;
    const bool whole = hi - lo == n_tile;
    B::pieces()[tid - B::first()] = {token,
                                     head0,
                                     min(a.group_heads, a.n_head - head0),
                                     a.slot[token],
                                     lo - from,
                                     max(0, hi - lo),
                                     B::n_row()[token],
                                     whole ? -1 : static_cast<int>(blockIdx.x) + tid};
    if (from + n_tile >= end || tid + 1 == n_segment) B::n_piece() = tid - B::first() + 1;
  }
  __syncthreads();
  return true;
}

template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
}
template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
  }
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
template <class T, class C, bool kSplit>
__device__ void load_queries(const Args& a, const Piece& p) {
  using B = Block<C>;
  constexpr int kPieces = kWidth / 8, kTurns = C::kHeads * kPieces / 384;
  static_assert(C::kHeads * kPieces % 384 == 0);
  const float* q = a.q.row(p.token) + static_cast<std::int64_t>(p.head0) * kWidth;
#pragma unroll 3
  for (int i = 0; i < kTurns; ++i) {
    const int at = i * 384 + static_cast<int>(threadIdx.x) - 128, h = at / kPieces,
              c = at % kPieces;
    float v[8] = {};
    if (h < p.n_head) {
      const auto* from = reinterpret_cast<const float4*>(q + h * kWidth + c * 8);
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
    if constexpr (kSplit) {
      store_16(to + kPanels * C::kQueryPanel, {rest[0], rest[1], rest[2], rest[3]});
    }
  }
  fence_for_tensor_cores();
}

template <class C>
__device__ void copy_panels(const CUtensorMap& map) {
  using B = Block<C>;
  Ring<C::kStages> ring;
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    const int slot = p.slot;
    int row = p.tile0 * kTileRows;
    for (int tile = p.n_tile; tile > 0; --tile, row += kTileRows) {
#pragma unroll
      for (int k = 0; k < kPanels; ++k) {
        const auto at = ring.at(k);
        wait(B::empty(at.stage), at.parity ^ 1);
        arrive_expecting(B::full(at.stage), kPanelBytes);
        load_tile(B::panel(at.stage), map, panel_at(k) * 64, row, slot, B::full(at.stage));
      }
      ring.next_tile();
    }
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

template <class T, class C, bool kSplit>
__device__ void scores(const Args& a) {
  using B = Block<C>;
  constexpr int N = C::kHeads;
  const int tid = static_cast<int>(threadIdx.x) - 128, lane = tid % 32, warp = tid / 32;
  Ring<C::kStages> ring;
  std::uint32_t weights_parity = 1;
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    if (p.n_tile == 0) continue;
    load_queries<T, C, kSplit>(a, p);
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
        if constexpr (kSplit) {
          const std::uint64_t rest = query + (kPanels * C::kQueryPanel >> 4);
#pragma unroll
          for (int step = 0; step < 4; ++step)
            LatentMma<T, N>::template run<false>(s, rows + 2 * step, rest + 2 * step, 1);
        }
      }
      mma_commit();
      if (tile > 0) add_weights();
      mma_wait<0>();
      if (lane == 0) arrive(B::empty(ring.stage));  // the rope part

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
      if (p.part >= 0) {
        a.stats[static_cast<std::int64_t>(p.part) * 2 * N + tid] = top;
        a.stats[(static_cast<std::int64_t>(p.part) * 2 + 1) * N + tid] = sum;
      } else if (a.out.part && tid < p.n_head) {
        float* to = a.out.ctx.row(p.token) + (p.head0 + tid) * (kLatent + 2);
        to[0] = top * kLn2;
        to[1] = sum;
      }
    }
    arrive_some(3, 384);
  }
}

// One head's context where the caller wants it: normalised, or as it is for a join over ranks.
__device__ __forceinline__ void put(const Args& a, int token, int head, int column, float v) {
  if (a.out.part) {
    a.out.ctx.row(token)[head * (kLatent + 2) + 2 + column] = v;
  } else {
    a.out.ctx.row(token)[static_cast<std::int64_t>(head) * kLatent + column] = v;
  }
}

// acc: latent columns 64 * (4 * half + m) ... of all heads.
template <class C>
__device__ void finish(const Args& a, const Piece& p, int half,
                       const float (&acc)[4][C::kHeads / 2]) {
  using B = Block<C>;
  constexpr int N = C::kHeads;
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const int head = j * 8 + lane % 4 * 2;
    const bool raw = p.part < 0 && a.out.part;
    const float s0 = raw ? 1.0f : 1.0f / B::total()[head],
                s1 = raw ? 1.0f : 1.0f / B::total()[head + 1];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* x = acc[m] + j * 4;
      if (p.part >= 0) {
        const std::int64_t at =
            (((static_cast<std::int64_t>(p.part) * 8 + half * 4 + m) * 4 + warp) * (N / 8) + j) *
                32 +
            lane;
        if constexpr (sizeof(typename C::Value) == 2) {
          reinterpret_cast<uint2*>(a.values)[at] = {pack<__half>(x[0] * s0, x[1] * s1),
                                                    pack<__half>(x[2] * s0, x[3] * s1)};
        } else {
          reinterpret_cast<float4*>(a.values)[at] = {x[0] * s0, x[1] * s1, x[2] * s0, x[3] * s1};
        }
      } else {
        const int column = (half * 4 + m) * 64 + warp * 16 + lane / 4;
        if (head < p.n_head) {
          put(a, p.token, p.head0 + head, column, x[0] * s0);
          put(a, p.token, p.head0 + head, column + 8, x[2] * s0);
        }
        if (head + 1 < p.n_head) {
          put(a, p.token, p.head0 + head + 1, column, x[1] * s1);
          put(a, p.token, p.head0 + head + 1, column + 8, x[3] * s1);
        }
      }
    }
  }
}

template <class T, class C, bool kSplit>
__device__ void context(const Args& a, int half) {
  using B = Block<C>;
  constexpr int N = C::kHeads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<C::kStages> ring;
  std::uint32_t weights_parity = 0;
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    if (p.n_tile == 0) continue;
    load_queries<T, C, kSplit>(a, p);
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
      if (lane == 0) arrive(B::empty(ring.at(1 + half).stage));
      mma_wait<2>();
      if (lane == 0) arrive(B::empty(ring.at(3 + half).stage));
      mma_wait<1>();
      if (lane == 0) arrive(B::empty(ring.at(5 + half).stage));
      mma_wait<0>();
      if (lane == 0) {
        arrive(B::empty(ring.at(7 + half).stage));
        arrive(B::weights_empty());
      }
      ring.next_tile();
    }
    sync_some(3, 384);
    finish<C>(a, p, half, acc);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class T, int N, bool kSplit>
__global__ void __launch_bounds__(kThreads, 1)
    decode_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using C = Config<T, N, kSplit>;
  asm volatile("griddepcontrol.launch_dependents;");
  if (!plan<C>(args)) return;
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    set_registers<C::kCopyRegs>();
    if (threadIdx.x == 0) copy_panels<C>(map);
  } else if (group == 1) {
    set_registers<C::kScoreRegs>();
    scores<T, C, kSplit>(args);
  } else {
    set_registers<C::kContextRegs>();
    context<T, C, kSplit>(args, group - 2);
  }
#endif
}

// Joins what the blocks of a token wrote, eight heads and 16 latent columns a block; its warps share the blocks' pieces.
template <class T, int N, bool kSplit>
__global__ void __launch_bounds__(256) join_pieces_kernel(const __grid_constant__ Args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using C = Config<T, N, kSplit>;
  constexpr int kWarps = 8;
  __shared__ int n_row[kMlaDecodeTok];
  __shared__ float weight[kMostPieces][8];
  __shared__ float4 partial[kWarps][32];
  __shared__ float head_top[8], head_sum[8];
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const int j = static_cast<int>(blockIdx.y), segment = static_cast<int>(blockIdx.z),
            sixteen = static_cast<int>(blockIdx.x);
  if (tid < a.n_tok) n_row[tid] = static_cast<int>(a.shard.rows(a.pos[tid] + 1));
  __syncthreads();
  const int token = segment / a.n_group, head0 = segment % a.n_group * a.group_heads,
            n_head = min(a.group_heads, a.n_head - head0);
  const Cut c = cut(n_row, a.n_tok, a.n_group, a.n_block);
  const int from = first_tile(n_row, segment, a.n_group), n_tile = tiles_of(n_row[token]);
  // Also where nothing is read: who follows this kernel relies on decode_kernel's end.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (n_tile == 0) {  // no rows here: the identity of a join over ranks
    for (int i = tid; i < 8 * 18 && a.out.part; i += 256) {
      const int head = j * 8 + i / 18, k = i % 18;
      if (head >= n_head) break;
      float* to = a.out.ctx.row(token) + (head0 + head) * (kLatent + 2);
      if (k >= 2) to[2 + sixteen * 16 + k - 2] = 0;
      if (sixteen == 0 && k < 2) to[k] = k == 0 ? -INFINITY : 0.0f;
    }
    return;
  }
  const int first_block = from / c.per, last_block = (from + n_tile - 1) / c.per,
            n_piece = last_block - first_block + 1;
  if (n_piece == 1) return;  // its block has written the result
  const std::int64_t part0 = first_block + segment;
  for (int i = tid; i < n_piece * 8; i += 256)
    weight[i / 8][i % 8] = a.stats[(part0 + i / 8) * 2 * N + j * 8 + i % 8];
  __syncthreads();
  float top = -INFINITY, sum = 0;  // a warp a head
  for (int i = lane; i < n_piece; i += 32) top = fmaxf(top, weight[i][warp]);
  top = warp_max(top);
  for (int i = lane; i < n_piece; i += 32) {
    const float w =
        exp2f(weight[i][warp] - top) * a.stats[((part0 + i) * 2 + 1) * N + j * 8 + warp];
    weight[i][warp] = w;
    sum += w;
  }
  sum = warp_sum(sum);
  if (lane == 0) {
    head_top[warp] = top;
    head_sum[warp] = sum;
  }
  __syncthreads();
  float4 acc{0, 0, 0, 0};
  const int head = lane % 4 * 2;
#pragma unroll 8
  for (int i = warp; i < n_piece; i += kWarps) {
    const std::int64_t at = ((part0 + i) * 32 + sixteen) * (N / 8) * 32 + j * 32 + lane;
    const float w0 = weight[i][head], w1 = weight[i][head + 1];
    if constexpr (sizeof(typename C::Value) == 2) {
      const uint2 v = reinterpret_cast<const uint2*>(a.values)[at];
      const float2 lo = unpack<__half>(v.x), hi = unpack<__half>(v.y);
      acc.x = fmaf(lo.x, w0, acc.x), acc.y = fmaf(lo.y, w1, acc.y);
      acc.z = fmaf(hi.x, w0, acc.z), acc.w = fmaf(hi.y, w1, acc.w);
    } else {
      const float4 v = reinterpret_cast<const float4*>(a.values)[at];
      acc.x = fmaf(v.x, w0, acc.x), acc.y = fmaf(v.y, w1, acc.y);
      acc.z = fmaf(v.z, w0, acc.z), acc.w = fmaf(v.w, w1, acc.w);
    }
  }
  partial[warp][lane] = acc;
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    const float4 v = partial[w][lane];
    acc.x += v.x, acc.y += v.y, acc.z += v.z, acc.w += v.w;
  }
  const int column = sixteen * 16 + lane / 4;
  for (int k = 0; k < 2; ++k) {
    const int local = j * 8 + head + k;
    if (local >= n_head) continue;
    const float s = a.out.part ? 1.0f : 1.0f / head_sum[head + k];
    put(a, token, head0 + local, column, (k == 0 ? acc.x : acc.y) * s);
    put(a, token, head0 + local, column + 8, (k == 0 ? acc.z : acc.w) * s);
  }
  if (a.out.part && sixteen == 0 && lane < 8 && j * 8 + lane < n_head) {
    float* to = a.out.ctx.row(token) + (head0 + j * 8 + lane) * (kLatent + 2);
    to[0] = head_top[lane] * kLn2;
    to[1] = head_sum[lane];
  }
#endif
}

CUtensorMap tile_map(const MlaCache& cache) {
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
  const cuuint32_t box[] = {64, kTileRows, 1}, steps[] = {1, 1, 1};
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

template <class T, int N, bool kSplit>
void launch(const MlaCache& cache, Args args, int n_block, std::byte* scratch,
            std::size_t scratch_bytes, cudaStream_t stream) {
  using C = Config<T, N, kSplit>;
  constexpr std::size_t kStats = 2 * N * sizeof(float),
                        kValues = N * kLatent * sizeof(typename C::Value);
  const int n_segment = args.n_tok * args.n_group,
            fit = static_cast<int>(std::min<std::size_t>(scratch_bytes / (kStats + kValues), 4096));
  args.n_block = std::min({n_block, kMostPieces, fit - n_segment});
  if (args.n_block < 1) {
    throw std::invalid_argument("mla_decode: " + std::to_string(scratch_bytes) +
                                " bytes of scratch for " + std::to_string(n_segment) + " segments");
  }
  args.values = scratch;
  args.stats = reinterpret_cast<float*>(
      scratch + static_cast<std::size_t>(args.n_block + n_segment) * kValues);

  const auto kernel = decode_kernel<T, N, kSplit>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared),
        "cudaFuncSetAttribute");
  kernel<<<static_cast<unsigned>(args.n_block), kThreads, C::kShared, stream>>>(tile_map(cache),
                                                                                args);
  check_launch("decode_kernel");
  // The join is launched while decode_kernel runs and waits in the device for its end.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kLatent / 16, N / 8, static_cast<unsigned>(n_segment));
  config.blockDim = 256;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, join_pieces_kernel<T, N, kSplit>, args), "join_pieces_kernel");
}

}  // namespace

bool has_mla_decode() {
#ifdef K3_SM90A
  return true;
#else
  return false;
#endif
}

MlaShape mla_shape(View<const float> q, std::int64_t n_head, const MlaCache& cache,
                   const BatchView& batch, int cc) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(q.data) % 16 == 0 && q.stride % 4 == 0 &&
                       reinterpret_cast<std::uintptr_t>(cache.rows) % 16 == 0;
  return {cache.type, cache.kv_latent,  cache.rope, n_head, batch.n_tok,
          cc,         has_mla_decode(), aligned};
}

void mla_decode(MlaOut out, View<const float> q, float scale, const MlaCache& cache,
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
  const auto run = [&]<class T, int N, bool kSplit>() {
    launch<T, N, kSplit>(cache, args, n_block, scratch, scratch_bytes, stream);
  };
  if (choice.split_q) {
    switch (choice.tile_heads) {
      case 16:
        return run.template operator()<__nv_bfloat16, 16, true>();
      case 32:
        return run.template operator()<__nv_bfloat16, 32, true>();
      default:
        return run.template operator()<__nv_bfloat16, 48, true>();
    }
  }
  switch (choice.tile_heads) {
    case 16:
      return run.template operator()<__half, 16, false>();
    case 32:
      return run.template operator()<__half, 32, false>();
    default:
      return run.template operator()<__half, 48, false>();
  }
}

}  // namespace k3::cuda
