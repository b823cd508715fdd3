// Panels: the layout of every f16 operand, in device memory and in shared memory alike. A matrix [rows, n_k] lies as
// n_panel panels of 64 columns, panel after panel; in a panel a row is 128 bytes, and its 16-byte pieces are permuted by
// the row's number modulo 8 as the tensor cores' 128-byte swizzle wants. So the tile (rows r0 .. r0 + n, panel p), r0 a
// multiple of 8, is one run of n * 128 bytes that is copied as it is.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace k3::cuda {

constexpr int kPanel = 64;       // columns of a panel
constexpr int kPanelRow = 128;   // bytes of a panel's row
constexpr int kPanelPieces = 8;  // 16-byte pieces of a panel's row

struct Panels {
  __half* data = nullptr;
  std::int64_t rows = 0;  // of one panel, a multiple of 8, slack included
  std::int64_t n_panel = 0;
};

inline __host__ __device__ std::int64_t panel_count(std::int64_t n_k) {
  return (n_k + kPanel - 1) / kPanel;
}

}  // namespace k3::cuda
