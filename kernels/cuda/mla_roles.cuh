// What the warps of a decode block do (mla_decode.cu): copy panels, make weights of scores, build the context.
#pragma once

#include "kernels/cuda/mla_decode.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace k3::cuda::latent {

// A head's maximum is moved only when a score lies this much above it (powers of two), so that few tiles have to move one:
// weights stay at or below 2^15, inside f16.
constexpr float kLazy = 15;

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
                       kPiecesAt = kWeightsAt + 2 * C::kWeights,
                       kFloatsAt = kPiecesAt + C::kMaxSegments * static_cast<int>(sizeof(Piece)),
                       kIntsAt = kFloatsAt + 8 * C::kHeads * 4,
                       kBarriersAt = kIntsAt + (static_cast<int>(kMlaDecodeTok) + 4) * 4;
  static_assert(kBarriersAt % 8 == 0 && kBarriersAt + 16 * C::kStages + 32 <= C::kShared);

  __device__ static std::uint32_t at(int bytes) { return address(g_shared) + bytes; }
  __device__ static std::uint32_t queries() { return at(0); }
  __device__ static std::uint32_t panel(int stage) { return at(kRing) + stage * kPanelBytes; }
  // Weights, their factors and flags are double: the next tile's are made while the last one's are in use.
  __device__ static std::uint32_t weights(int buffer) {
    return at(kWeightsAt) + buffer * C::kWeights;
  }
  __device__ static std::uint32_t full(int stage) { return at(kBarriersAt) + 8 * stage; }
  __device__ static std::uint32_t empty(int stage) { return full(C::kStages) + 8 * stage; }
  __device__ static std::uint32_t weights_full(int buffer) {
    return empty(C::kStages) + 8 * buffer;
  }
  __device__ static std::uint32_t weights_empty(int buffer) {
    return empty(C::kStages) + 16 + 8 * buffer;
  }
  __device__ static Piece* pieces() { return reinterpret_cast<Piece*>(g_shared + kPiecesAt); }
  __device__ static float* floats() { return reinterpret_cast<float*>(g_shared + kFloatsAt); }
  __device__ static float* warp_top() { return floats(); }
  __device__ static float* top() { return floats() + 4 * C::kHeads; }
  __device__ static float* factor(int buffer) { return floats() + (6 + buffer) * C::kHeads; }
  __device__ static float* total() { return floats() + 5 * C::kHeads; }
  __device__ static int* n_row() { return reinterpret_cast<int*>(g_shared + kIntsAt); }
  __device__ static int& n_piece() { return n_row()[kMlaDecodeTok]; }
  __device__ static int& first() { return n_row()[kMlaDecodeTok + 1]; }
  __device__ static int& rescale(int buffer) { return n_row()[kMlaDecodeTok + 2 + buffer]; }
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
    if (tid < 2) {
      barrier_init(B::weights_full(tid), 1);
      barrier_init(B::weights_empty(tid), 8);
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

// s = a tile's rows . queries, rows x heads; `meanwhile` runs while the tensor cores work.
template <class C, class F>
__device__ __forceinline__ void multiply_queries(float (&s)[C::kHeads / 2],
                                                 const Ring<C::kStages>& ring, const F& meanwhile) {
  using B = Block<C>;
  using Mma = LatentMma<typename C::Row, C::kHeads>;
#pragma unroll
  for (int k = 0; k < kPanels; ++k) {
    const auto at = ring.at(k);
    wait(B::full(at.stage), at.parity);
    mma_fence();
    const std::uint64_t rows = descriptor(B::panel(at.stage)),
                        query = descriptor(B::queries() + panel_at(k) * C::kQueryPanel);
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // 16 columns, 32 bytes, two units of a descriptor
      Mma::template run<false>(s, rows + 2 * step, query + 2 * step, k + step > 0);
    }
    if constexpr (C::kSplit) {
      const std::uint64_t rest = query + (kPanels * C::kQueryPanel >> 4);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Mma::template run<false>(s, rows + 2 * step, rest + 2 * step, 1);
    }
  }
  mma_commit();
  meanwhile();
  mma_wait<0>();
}

// Rows of the tile from n_row on have no weight.
template <class C>
__device__ void mask(float (&s)[C::kHeads / 2], const Ring<C::kStages>& ring, int n_row) {
  if (n_row >= kTileRows) return;
  const int tid = static_cast<int>(threadIdx.x) - 128, row = tid / 32 * 16 + tid % 32 / 4;
  clear_rows<C>(ring, n_row);
#pragma unroll
  for (int j = 0; j < C::kHeads / 2; ++j) {
    if (row + (j % 4 < 2 ? 0 : 8) >= n_row) s[j] = -INFINITY;
  }
}

// Weights 2^(s - top), heads x rows, to shared memory. top: maxima of this thread's columns. True: a score is so far above
// its head's maximum that these weights may not be used.
template <class C>
__device__ __forceinline__ bool put_weights(const float (&s)[C::kHeads / 2],
                                            const float (&top)[C::kHeads / 4], int buffer) {
  using T = typename C::Row;
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 - 4;
  bool above = false;
#pragma unroll
  for (int j = 0; j < C::kHeads / 8; j += 2) {
    std::uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float* x = s + (j + k) * 4;
      const float m0 = top[(j + k) * 2], m1 = top[(j + k) * 2 + 1];
      above |= fmaxf(x[0], x[2]) > m0 + kLazy || fmaxf(x[1], x[3]) > m1 + kLazy;
      w[2 * k] = pack<T>(exp2_fast(x[0] - m0), exp2_fast(x[1] - m1));
      w[2 * k + 1] = pack<T>(exp2_fast(x[2] - m0), exp2_fast(x[3] - m1));
    }
    const int head = (j + lane / 16) * 8 + lane % 8, eight = warp * 2 + lane / 8 % 2;
    store_transposed(Block<C>::weights(buffer) + head * 128 + ((eight ^ (head & 7)) << 4), w[0],
                     w[1], w[2], w[3]);
  }
  fence_for_tensor_cores();
  return above;
}

// Moves the maxima of those heads whose scores are too far above them. mine, sum: maximum and sum of head `tid`.
template <class C>
__device__ void raise_tops(const float (&s)[C::kHeads / 2], float (&top)[C::kHeads / 4],
                           float& mine, float& sum, int buffer) {
  using B = Block<C>;
  constexpr int N = C::kHeads;
  const int tid = static_cast<int>(threadIdx.x) - 128, lane = tid % 32, warp = tid / 32;
  float most[N / 4];
#pragma unroll
  for (int j = 0; j < N / 4; ++j) most[j] = fmaxf(s[j / 2 * 4 + j % 2], s[j / 2 * 4 + 2 + j % 2]);
  int column = 0;
  column_top<N / 4, 16>(most, lane, column);
#pragma unroll
  for (int j = 0; j < columns_left(N / 4); ++j) {
    const int c = column + j;
    B::warp_top()[warp * N + c / 2 * 8 + lane % 4 * 2 + c % 2] = most[j];
  }
  sync_some(1, 128);
  if (tid < N) {
    float tile_top = B::warp_top()[tid];
    for (int w = 1; w < 4; ++w) tile_top = fmaxf(tile_top, B::warp_top()[w * N + tid]);
    float factor = 1;
    if (tile_top > mine + kLazy) {  // always where there was none
      factor = exp2_fast(mine - tile_top);
      mine = tile_top;
      sum *= factor;
    }
    B::top()[tid] = mine;
    B::factor(buffer)[tid] = factor;
  }
  sync_some(1, 128);
#pragma unroll
  for (int j = 0; j < N / 4; ++j) top[j] = B::top()[j / 2 * 8 + lane % 4 * 2 + j % 2];
}

// The sum of head `tid`'s weights, as they were rounded, so that rounding them favours no head.
template <class C>
__device__ __forceinline__ float weights_sum(int tid, int buffer) {
  if (tid >= C::kHeads) return 0;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint4 v = load_16(Block<C>::weights(buffer) + tid * 128 + ((k ^ (tid & 7)) << 4));
    for (const std::uint32_t two : {v.x, v.y, v.z, v.w}) {
      const float2 w = unpack<typename C::Row>(two);
      sum += w.x + w.y;
    }
  }
  return sum;
}

template <class C>
__device__ void scores(const Args& a) {
  using B = Block<C>;
  constexpr int N = C::kHeads;
  const int tid = static_cast<int>(threadIdx.x) - 128, lane = tid % 32;
  Ring<C::kStages> ring;
  std::uint32_t count = 0;  // of tiles
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    if (p.n_tile == 0) continue;
    load_queries<C>(a, p);
    sync_some(2, 384);
    float mine = -INFINITY, sum = 0;  // of head `tid`
    float top[N / 4];                 // of this thread's columns
    for (int tile = 0; tile < p.n_tile; ++tile) {
      const int buffer = static_cast<int>(count & 1);
      float s[N / 2];
      multiply_queries<C>(s, ring, [&] {
        if (tile > 0) sum += weights_sum<C>(tid, buffer ^ 1);
      });
      release<C>(ring.stage, lane);  // the rope part
      mask<C>(s, ring, p.n_row - (p.tile0 + tile) * kTileRows);
      wait(B::weights_empty(buffer), (count >> 1 & 1) ^ 1);
      // Most tiles fit under the maxima there are: their weights are made without asking first.
      const bool above = any_of_some(1, 128, tile == 0 || put_weights<C>(s, top, buffer));
      if (above) {
        raise_tops<C>(s, top, mine, sum, buffer);
        put_weights<C>(s, top, buffer);
        sync_some(1, 128);
      }
      if (tid == 0) {
        B::rescale(buffer) = above ? 1 : 0;
        arrive(B::weights_full(buffer));
      }
      ring.next_tile();
      ++count;
    }
    sum += weights_sum<C>(tid, static_cast<int>(count & 1) ^ 1);
    if (tid < N) {
      B::total()[tid] = sum;
      a.stats[static_cast<std::int64_t>(p.part) * 2 * N + tid] = mine;
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
  std::uint32_t count = 0;  // of tiles
  for (int i = 0; i < B::n_piece(); ++i) {
    const Piece& p = B::pieces()[i];
    if (p.n_tile == 0) continue;
    load_queries<C>(a, p);
    sync_some(2, 384);
    float acc[4][N / 2];
    for (int tile = 0; tile < p.n_tile; ++tile) {
      const int buffer = static_cast<int>(count & 1);
      wait(B::weights_full(buffer), count >> 1 & 1);
      ++count;
      if (tile > 0 && *static_cast<volatile int*>(&B::rescale(buffer)) != 0) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          const float2 f =
              *reinterpret_cast<const float2*>(B::factor(buffer) + j * 8 + lane % 4 * 2);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            acc[m][j * 4] *= f.x, acc[m][j * 4 + 1] *= f.y;
            acc[m][j * 4 + 2] *= f.x, acc[m][j * 4 + 3] *= f.y;
          }
        }
      }
      const std::uint64_t weights = descriptor(B::weights(buffer));
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
      if (lane == 0) arrive(B::weights_empty(buffer));
      ring.next_tile();
    }
    sync_some(3, 384);
    finish<C>(a, p, half, acc);
  }
}

}  // namespace k3::cuda::latent

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
