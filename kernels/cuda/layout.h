// How a weight's bytes lie on the device (Weight::layout).
#pragma once

#include <cstdint>

#include "kernels/backend.h"

namespace k3::cuda {

enum Layout : int {
  // The blocks as in the file, rows 16-byte aligned.
  kRaw = 0,
  // Per row, each part 16-byte aligned, so that loads are coalesced and nothing straddles:
  //   Q8_0:  codes [n_in] int8 | scales [n_in / 32] half
  //   IQ1_S: low index bytes [n_in / 8] | h [n_in / 32] u16 | d [blocks] half
  kPlanes = 1,
};

inline std::int64_t align16(std::int64_t n) { return (n + 15) / 16 * 16; }

// Bytes of the parts of a row in kPlanes; n_block: 256-blocks that the row touches.
struct PlaneSizes {
  std::int64_t first = 0;   // codes, index bytes
  std::int64_t second = 0;  // scales, h
  std::int64_t third = 0;   // d
  std::int64_t row() const { return first + second + third; }
};

inline PlaneSizes plane_sizes(BlockType type, std::int64_t n_in, std::int64_t n_block) {
  if (type == BlockType::kQ8_0) return {align16(n_in), align16(n_in / 32 * 2), 0};
  return {align16(n_in / 8), align16(n_in / 32 * 2), align16(n_block * 2)};
}

// A band may be stored in planes when its cuts are those of groups of 32.
inline bool has_planes(BlockType type, std::int64_t n_in, std::int64_t first) {
  return (type == BlockType::kQ8_0 || type == BlockType::kIQ1_S) && n_in % 32 == 0 &&
         first % 32 == 0;
}

}  // namespace k3::cuda
