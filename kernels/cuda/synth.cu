// Synthetic weights, one thread a block of the file's format.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/ops.h"

namespace k3::cuda {
namespace {

__global__ void synth_rows_kernel(std::uint8_t* to, std::int64_t to_pitch, std::int64_t n_row,
                                  SynthRows rows) {
  const std::int64_t n = n_row * rows.n_block;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += step) {
    const std::int64_t row = i / rows.n_block, block = i % rows.n_block;
    synth_block(rows.recipe,
                static_cast<std::uint64_t>(rows.first_block + row * rows.stride + block),
                to + row * to_pitch + block * rows.block_bytes, rows.block_bytes);
  }
}

}  // namespace

void synth_rows(std::byte* to, std::int64_t to_pitch, std::int64_t n_row, const SynthRows& rows,
                cudaStream_t stream) {
  const std::int64_t n = n_row * rows.n_block;
  if (n == 0) return;
  constexpr std::int64_t kThreads = 256, kMostBlocks = 1 << 16;
  const auto grid = static_cast<unsigned>(std::min(kMostBlocks, (n + kThreads - 1) / kThreads));
  synth_rows_kernel<<<grid, kThreads, 0, stream>>>(reinterpret_cast<std::uint8_t*>(to), to_pitch,
                                                   n_row, rows);
  check_launch("synth_rows");
}

}  // namespace k3::cuda
