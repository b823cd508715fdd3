// Weight blocks to float32, the definition that every backend is held to: bit-exact against tests/data/dequant.
// Formulas: tests/data/dequant/FORMATS.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loader/blocks.h"

namespace k3 {

// out[0 .. n_elem) from consecutive blocks; n_elem must be a multiple of the block (std::invalid_argument otherwise).
// Blocks are at least 2-byte aligned, as every tensor of a file is; `out` may not overlap them.
void dequantize(BlockType type, const std::byte* blocks, float* out, std::int64_t n_elem);

// Elements [first, first + n) of a row that starts at `row`, at any place in any block. Blocks outside the range are
// not read.
void dequantize_range(BlockType type, const std::byte* row, std::int64_t first, std::int64_t n,
                      float* out);

}  // namespace k3
