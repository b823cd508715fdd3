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
  auto* low = reinterpret_cast<std::uint8_t*>(row);
  auto* h = reinterpret_cast<std::uint16_t*>(row + sizes.first);
  auto* d = reinterpret_cast<std::uint16_t*>(row + sizes.first + sizes.second);
  for (std::int64_t o = threadIdx.x; o < n_in / 8; o += blockDim.x) {
    const std::int64_t octet = first / 8 + o;
    low[o] = blocks[octet / 32].q[octet % 32];
  }
  for (std::int64_t g = threadIdx.x; g < n_in / 32; g += blockDim.x) {
    const std::int64_t group = first / 32 + g;
    h[g] = blocks[group / 8].h[group % 8];
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
