// Split attention over the latent cache on tensor cores: what its kernels share. Shapes: K3's rows of 512 latent values and 64
// more, tiles of 64 rows, N heads of a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/mla_decode.h"
#include "kernels/cuda/mla_sm90.cuh"

namespace k3::cuda::latent {

constexpr int kTileRows = 64;
constexpr int kLatent = 512, kWidth = 576;
constexpr int kPanels = 9;                    // of 64 columns: eight latent ones and the rope part
constexpr int kPanelBytes = kTileRows * 128;  // of 64 rows
constexpr int kSharedMost = 227 * 1024;

// Rows of one token that one block reads.
struct Piece {
  int token, head0, n_head, slot;
  int tile0, n_tile, n_row;  // n_row: of the token in all, from its row 0
  int part;                  // where the block's result goes
};

struct Args {
  MlaOut out;
  MlaQueries q;
  float scale;  // times log2 e
  const std::int32_t* pos;
  const std::int32_t* slot;
  RowShard shard;
  int n_tok, n_head, n_group, group_heads;
  int n_block;        // that share the list of tiles; a pair counts once
  std::byte* values;  // [parts] of a block's context / its sum, in the order of its registers
  float* stats;       // [parts][2][N]: maximum (powers of two), sum
};

// kPaired: two blocks with a group of heads each read the same rows together.
template <class T, int N, bool kSplitQuery, bool kPaired>
struct Config {
  using Row = T;
  static constexpr int kHeads = N;
  static constexpr bool kSplit = kSplitQuery, kPair = kPaired;
  static constexpr int kQueryPanel = N * 128;
  static constexpr int kQueries = (kSplit ? 2 : 1) * kPanels * kQueryPanel;
  static constexpr int kWeights = N * 128;
  static constexpr int kMaxSegments = 3 * static_cast<int>(kMlaDecodeTok);
  static constexpr int kRest =
      8 * N * 4 + kMaxSegments * static_cast<int>(sizeof(Piece)) + 1024;  // lists, flags, barriers
  static constexpr int kRoom = kSharedMost - kQueries - 2 * kWeights - kRest;
  static constexpr int kStages = std::min(24, kRoom / kPanelBytes);
  static constexpr int kShared = kQueries + 2 * kWeights + kRest + kStages * kPanelBytes;
  // Of a thread, by role; 512 together.
  static constexpr int kCopyRegs = 24;
  static constexpr int kContextRegs = 168;
  static constexpr int kScoreRegs = 512 - kCopyRegs - 2 * kContextRegs;
  // Four values of a block's result. A combination of f16 rows with weights that sum to one is itself in f16's range;
  // bf16's is wider.
  using Four = std::conditional_t<std::is_same_v<T, __half>, uint2, float4>;
  static_assert(kStages >= kPanels + 2);
};

// How the list of tiles is cut; the same in both kernels. A segment of the list is a token's rows for one group of heads, or
// for both groups of a pair.
struct Cut {
  int per = 1;  // tiles of a block
  int total = 0;
};
__host__ __device__ inline int tiles_of(std::int64_t n_row) {
  return static_cast<int>((n_row + kTileRows - 1) / kTileRows);
}
__device__ inline Cut cut(const int* n_row, int n_tok, int n_list, int n_block) {
  Cut c;
  for (int t = 0; t < n_tok; ++t) c.total += tiles_of(n_row[t]) * n_list;
  c.per = max(1, (c.total + n_block - 1) / n_block);
  return c;
}
__device__ inline int first_tile(const int* n_row, int segment, int n_list) {
  const int token = segment / n_list;
  int before = 0;
  for (int t = 0; t < token; ++t) before += tiles_of(n_row[t]) * n_list;
  return before + segment % n_list * tiles_of(n_row[token]);
}
// Blocks and segments are counted up along the list, at least one of them from piece to piece.
template <class C>
__device__ inline int part_of(int block, int segment, int group) {
  return C::kPair ? (block + segment) * 2 + group : block + segment;
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

}  // namespace k3::cuda::latent
