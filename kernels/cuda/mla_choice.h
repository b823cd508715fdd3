// Which kernel serves attention over the latent cache: a pure function of shapes, type and device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"

namespace k3::cuda {

struct MlaShape {
  CacheType type = CacheType::kF32;
  std::int64_t kv_latent = 0;
  std::int64_t rope = 0;
  std::int64_t n_head = 0;
  std::int64_t n_tok = 0;
  int cc = 0;              // the device's compute capability, 90 = 9.0
  bool has_sm90a = false;  // this build has code for sm_90a
  bool aligned = false;    // queries and cache rows lie on 16 bytes, also from row to row
};

struct MlaChoice {
  bool tensor_cores = false;  // false: the exact kernel
  int tile_heads = 0;         // heads of a block, padded
  int n_group = 0;            // blocks that share a token's rows, each with its heads
  int group_heads = 0;        // heads of a group; the last may have fewer
  bool pair = false;          // two groups, whose blocks share what they bring from memory
  // Queries as the sum of two rounded values: bf16 alone would lose what the scores need.
  bool split_q = false;
  bool operator==(const MlaChoice&) const = default;
};

constexpr std::int64_t kMlaDecodeTok = 64;

inline MlaChoice choose_mla(Precision precision, const MlaShape& s) {
  MlaChoice c;
  c.tensor_cores = precision == Precision::kFast && s.has_sm90a && s.cc == 90 && s.aligned &&
                   s.type != CacheType::kF32 && s.kv_latent == 512 && s.rope == 64 &&
                   s.n_head >= 1 && s.n_head <= 128 && s.n_tok <= kMlaDecodeTok;
  if (!c.tensor_cores) return c;
  c.split_q = s.type == CacheType::kBF16;
  // Accumulators of 48 heads leave registers to spare, and a ring of two tiles fits beside their queries.
  constexpr int kMost = 48;
  const int n_head = static_cast<int>(s.n_head);
  c.n_group = (n_head + kMost - 1) / kMost;
  c.group_heads = (n_head + c.n_group - 1) / c.n_group;
  c.pair = c.n_group == 2;
  c.tile_heads = c.group_heads <= 16 ? 16 : c.group_heads <= 32 && !c.pair ? 32 : kMost;
  return c;
}

}  // namespace k3::cuda
