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
  //   IQ1_S: codes [n_in / 32] u32 x 2 | scales [n_in / 32] nibbles | d [blocks] half
  // A code is the ternary value plus one in 2 bits: the codebook is looked up once, here, and not by every token. Code e of
  // a group of 32 lies in word e / 16, byte e % 4, at bit 2 * (e % 16 / 4), so that a shift and a mask give four
  // neighbours as four bytes. Nibble (low one first): bits 0-2 the scale s, bit 3 whether delta is negative;
  // weight = d * (2s + 1) * (code - 1 +- 1/8).
  kPlanes = 1,
};

inline std::int64_t align16(std::int64_t n) { return (n + 15) / 16 * 16; }

// Bytes of the parts of a row in kPlanes; n_block: 256-blocks that the row touches.
struct PlaneSizes {
  std::int64_t first = 0;   // codes
  std::int64_t second = 0;  // scales
  std::int64_t third = 0;   // d
  std::int64_t row() const { return first + second + third; }
};

inline PlaneSizes plane_sizes(BlockType type, std::int64_t n_in, std::int64_t n_block) {
  if (type == BlockType::kQ8_0) return {align16(n_in), align16(n_in / 32 * 2), 0};
  return {align16(n_in / 4), align16((n_in / 32 + 1) / 2), align16(n_block * 2)};
}

// A band may be stored in planes when its cuts are those of groups of 32.
inline bool has_planes(BlockType type, std::int64_t n_in, std::int64_t first) {
  return (type == BlockType::kQ8_0 || type == BlockType::kIQ1_S) && n_in % 32 == 0 &&
         first % 32 == 0;
}

}  // namespace k3::cuda
