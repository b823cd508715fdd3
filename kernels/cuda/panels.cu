// Operands of the prefill products: activations and weights of every type to f16 panels.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/prefill_math.cuh"
#include "kernels/cuda/reduce.cuh"

namespace k3::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kPanelPieces;

// The pieces of one row, 8 values each; `low` also writes what f16 dropped, n_panel / 2 panels further on.
__device__ __forceinline__ void write_piece(const Panels& to, std::int64_t row, std::int64_t piece,
                                            const float (&v)[8], bool low) {
  const std::int64_t panel = piece / kPanelPieces;
  const int in = static_cast<int>(piece % kPanelPieces);
  *panel_piece(to, panel, row, in) = pack8(v);
  if (!low) return;
  float rest[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) rest[j] = v[j] - __half2float(__float2half_rn(v[j]));
  *panel_piece(to, panel + to.n_panel / 2, row, in) = pack8(rest);
}

__device__ __forceinline__ void read8(const float* x, std::int64_t n, bool aligned, float (&v)[8]) {
  if (aligned && n >= 8) {
    load_x<8, true>(x, v);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = j < n ? x[j] : 0.0f;
}

// A block per row.
__global__ void __launch_bounds__(kThreads)
    to_panels_kernel(const Panels to, float* scale, const View<const float> x, bool split) {
  __shared__ float scratch[33];
  const std::int64_t t = blockIdx.x, pieces = to.n_panel / (split ? 2 : 1) * kPanelPieces;
  const float* row = x.row(t);
  const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
  float top = 0;
  for (std::int64_t p = threadIdx.x; p * 8 < x.cols; p += kThreads) {
    float v[8];
    read8(row + p * 8, x.cols - p * 8, aligned, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(v[j]));
  }
  top = block_max(top, scratch);
  const float up = row_factor(top);
  if (threadIdx.x == 0) scale[t] = 1.0f / up;
  for (std::int64_t p = threadIdx.x; p < pieces; p += kThreads) {
    float v[8];
    read8(row + p * 8, x.cols - p * 8, aligned, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= up;
    write_piece(to, t, p, v, split);
  }
}

// A thread per octet: 8 neighbours make a panel's row, so a warp reads 4 rows and writes 512 bytes in one run.
template <class Codec>
__global__ void __launch_bounds__(kThreads)
    weight_kernel(const Panels to, const float* scale, const __grid_constant__ Weight w,
                  std::int64_t mat, std::int64_t row0, std::int64_t n_row, bool split) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock +
                         threadIdx.x / kPanelPieces,
                     piece = static_cast<std::int64_t>(blockIdx.y) * kPanelPieces +
                             threadIdx.x % kPanelPieces;
  if (r >= n_row) return;
  float v[8] = {};
  if (piece * 8 < w.n_in) read_octet<Codec>(w, mat, row0 + r, piece * 8, v);
  if (scale != nullptr) {
    const float up = 1.0f / scale[r];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= up;
  }
  write_piece(to, r, piece, v, split);
}

// A block per row of plain floats.
template <class Codec>
__global__ void __launch_bounds__(kThreads)
    weight_scale_kernel(float* scale, const __grid_constant__ Weight w, std::int64_t mat,
                        std::int64_t row0) {
  __shared__ float scratch[33];
  float top = 0;
  for (std::int64_t i = threadIdx.x * 8; i < w.n_in; i += kThreads * 8) {
    float v[8];
    read_octet<Codec>(w, mat, row0 + blockIdx.x, i, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(v[j]));
  }
  top = block_max(top, scratch);
  if (threadIdx.x == 0) scale[blockIdx.x] = 1.0f / row_factor(top);
}

// A thread turns 8 x 8 elements round. blockIdx.y: matrix; rows of the weight become columns.
template <class Codec>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const Panels to, const __grid_constant__ Weight w, std::int64_t mat0) {
  const std::int64_t across = w.n_in / 8,
                     i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                     n8 = i % across, l8 = i / across, h = blockIdx.y;
  if (l8 * 8 >= w.n_out) return;
  float v[8][8];
#pragma unroll
  for (int l = 0; l < 8; ++l) read_octet<Codec>(w, mat0 + h, l8 * 8 + l, n8 * 8, v[l]);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float column[8];
#pragma unroll
    for (int l = 0; l < 8; ++l) column[l] = v[l][n];
    *panel_piece(to, l8 / kPanelPieces, h * w.n_in + n8 * 8 + n,
                 static_cast<int>(l8 % kPanelPieces)) = pack8(column);
  }
}

unsigned blocks_for(std::int64_t n, std::int64_t per) {
  return static_cast<unsigned>((n + per - 1) / per);
}

}  // namespace

int processors() {
  int device = 0, n = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return n;
}

bool has_row_scale(BlockType type) { return type == BlockType::kF32 || type == BlockType::kBF16; }

void to_panels(Panels to, float* scale, View<const float> x, int terms, cudaStream_t stream) {
  if (x.empty()) return;
  to_panels_kernel<<<static_cast<unsigned>(x.rows), kThreads, 0, stream>>>(to, scale, x,
                                                                           terms == 3);
  check_launch("to_panels_kernel");
}

void weight_to_panels(Panels to, float* scale, const Weight& w, std::int64_t mat, std::int64_t row0,
                      std::int64_t n_row, int terms, cudaStream_t stream) {
  const bool split = terms == 3, scaled = has_row_scale(w.type);
  const dim3 grid(blocks_for(n_row, kRowsPerBlock),
                  static_cast<unsigned>(to.n_panel / (split ? 2 : 1)));
  with_codec(w, [&]<class Codec>() {
    if (scaled) {
      weight_scale_kernel<Codec>
          <<<static_cast<unsigned>(n_row), kThreads, 0, stream>>>(scale, w, mat, row0);
    }
    weight_kernel<Codec>
        <<<grid, kThreads, 0, stream>>>(to, scaled ? scale : nullptr, w, mat, row0, n_row, split);
  });
  check_launch("weight_kernel");
}

void transposed_to_panels(Panels to, const Weight& w, std::int64_t mat0, std::int64_t n_mat,
                          cudaStream_t stream) {
  const dim3 grid(blocks_for(w.n_in / 8 * (w.n_out / 8), kThreads), static_cast<unsigned>(n_mat));
  with_codec(w, [&]<class Codec>() {
    transpose_kernel<Codec><<<grid, kThreads, 0, stream>>>(to, w, mat0);
  });
  check_launch("transpose_kernel");
}

}  // namespace k3::cuda
