// From the file's blocks to kPlanes: one block of threads a row.
#include "kernels/cuda/check.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/ops.h"

namespace k3::cuda {
namespace {

__global__ void repack_q8_0_kernel(std::byte* to, std::int64_t to_pitch, const std::byte* from,
                                   std::int64_t from_pitch, std::int64_t n_in, PlaneSizes sizes) {
  const auto* blocks = reinterpret_cast<const BlockQ8_0*>(from + blockIdx.x * from_pitch);
  std::byte* row = to + blockIdx.x * to_pitch;
  auto* codes = reinterpret_cast<std::int8_t*>(row);
  auto* scales = reinterpret_cast<std::uint16_t*>(row + sizes.first);
  for (std::int64_t i = threadIdx.x; i < n_in; i += blockDim.x) codes[i] = blocks[i / 32].q[i % 32];
  for (std::int64_t i = threadIdx.x; i < n_in / 32; i += blockDim.x) scales[i] = blocks[i].d;
}

__global__ void repack_iq1_s_kernel(std::byte* to, std::int64_t to_pitch, const std::byte* from,
                                    std::int64_t from_pitch, std::int64_t n_in, std::int64_t first,
                                    std::int64_t n_block, PlaneSizes sizes) {
  const auto* blocks = reinterpret_cast<const BlockIQ1_S*>(from + blockIdx.x * from_pitch);
  std::byte* row = to + blockIdx.x * to_pitch;
  auto* codes = reinterpret_cast<std::uint32_t*>(row);
  auto* scales = reinterpret_cast<std::uint8_t*>(row + sizes.first);
  auto* d = reinterpret_cast<std::uint16_t*>(row + sizes.first + sizes.second);
  for (std::int64_t i = threadIdx.x; i < n_in / 16; i += blockDim.x) {  // two octets a word
    std::uint32_t word = 0;
    for (int o = 0; o < 2; ++o) {
      const std::int64_t octet = first / 8 + 2 * i + o;
      const BlockIQ1_S& block = blocks[octet / 32];
      const int at = static_cast<int>(octet % 32);
      const std::uint32_t grid =
          d_iq1s.v[block.q[at] | (block.h[at / 4] >> (3 * (at % 4)) & 7) << 8];
      for (int j = 0; j < 8; ++j) {
        const auto code = static_cast<std::uint32_t>(static_cast<int>(iq1_value(grid, j)) + 1);
        word |= code << (8 * (j % 4) + 2 * (2 * o + j / 4));
      }
    }
    codes[i] = word;
  }
  for (std::int64_t i = threadIdx.x; i < (n_in / 32 + 1) / 2; i += blockDim.x) {
    unsigned byte = 0;
    for (int half = 0; half < 2 && 2 * i + half < n_in / 32; ++half) {
      const std::int64_t group = first / 32 + 2 * i + half;
      byte |= (blocks[group / 8].h[group % 8] >> 12) << (4 * half);
    }
    scales[i] = static_cast<std::uint8_t>(byte);
  }
  for (std::int64_t b = threadIdx.x; b < n_block; b += blockDim.x) d[b] = blocks[b].d;
}

}  // namespace

void repack(std::byte* to, const std::byte* from, std::int64_t from_pitch, std::int64_t n_row,
            const Weight& w, cudaStream_t stream) {
  if (n_row == 0) return;
  const std::int64_t n_block = (w.first + w.n_in + 255) / 256;
  const PlaneSizes sizes = plane_sizes(w.type, w.n_in, n_block);
  const auto grid = static_cast<unsigned>(n_row);
  if (w.type == BlockType::kQ8_0) {
    repack_q8_0_kernel<<<grid, 256, 0, stream>>>(to, w.row_bytes, from, from_pitch, w.n_in, sizes);
  } else {
    repack_iq1_s_kernel<<<grid, 128, 0, stream>>>(to, w.row_bytes, from, from_pitch, w.n_in,
                                                  w.first, n_block, sizes);
  }
  check_launch("repack");
}

}  // namespace k3::cuda
