// The fast path for many tokens: operands as f16 panels (panels.h), products on tensor cores with f32 sums.
// Accuracy: f16 keeps 11 bits where bf16 keeps 8; activations are scaled by a power of two per row so that their range does
// not matter, and f32 weights (the router's, say) are split into two f16 parts, which gives f32's accuracy back.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/panels.h"

namespace k3::cuda {

// ---- which kernel runs: pure functions of shape and type, tested ------------------------------------------------------------

// Below, a product reads its weights fewer times in the decode kernels.
constexpr std::int64_t kMinPanelTok = 33;
// Up to here, and up to so many tokens a segment, attention goes the absorbed way: it reads each cached row once for all
// heads, where expanding pays for every row of the cache.
constexpr std::int64_t kMaxAbsorbedTok = 64;

// Whether y = x . w^T is computed from panels. Octets of a row never cross a scale group.
bool uses_panels(const Weight& w, std::int64_t n_tok);
// Parts that a product is made of: 1, or 3 where an f32 weight is split: high.high + low.high + high.low.
int panel_terms(BlockType type);
// Whether routed experts go through the grouped product: types that it decodes in registers.
bool uses_grouped_experts(const ExpertWeights& w, std::int64_t n_tok);
// Whether attention runs in the non-absorbed form, over expanded keys and values.
bool uses_expanded_mla(const Weight& k_b, const Weight& v_b, const MlaCache& cache,
                       const BatchView& batch, std::size_t workspace_bytes);
// Whether the delta rule runs in chunks: heads of 128, segments long enough to be worth it, rows on 16 bytes.
bool uses_chunked_kda(const KdaState& state, const BatchView& batch, View<const float> qkv,
                      View<const float> g);
// Whether the convolution runs with a segment's tokens in parallel.
bool uses_parallel_conv(const KdaState& state, const BatchView& batch);

// ---- launching ----------------------------------------------------------------------------------------------------------------

// Whether the current device runs the tensor core kernels of this build: compiled for, and running on, compute capability
// 9.0 with its own instructions (sm_90a).
bool has_prefill_code();
// Multiprocessors of the current device.
int processors();
// More than 48 KiB of shared memory for a kernel, on the current device.
template <class Kernel>
void allow_shared(Kernel* kernel, std::size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

// ---- panels.cu: operands ------------------------------------------------------------------------------------------------------

// x to panels, row t times a power of two; scale[t]: what undoes it. terms 3: the parts that f16 drops follow as as many
// panels again. to.n_panel counts all of them.
void to_panels(Panels to, float* scale, View<const float> x, int terms, cudaStream_t stream);
// Rows [row0, row0 + n_row) of matrix `mat` to panels. scale: per row as above for plain floats, not touched otherwise.
void weight_to_panels(Panels to, float* scale, const Weight& w, std::int64_t mat, std::int64_t row0,
                      std::int64_t n_row, int terms, cudaStream_t stream);
// Whether weight_to_panels() writes scales.
bool has_row_scale(BlockType type);
// Row h * w.n_in + n, column l: element n of row l of matrix mat0 + h, for n_mat matrices.
void transposed_to_panels(Panels to, const Weight& w, std::int64_t mat0, std::int64_t n_mat,
                          cudaStream_t stream);

// ---- gemm.cu -------------------------------------------------------------------------------------------------------------------

// How many rows of a cache a segment needs: known to the device only.
struct RowLimit {
  const std::int32_t* pos = nullptr;
  const std::int32_t* seg_begin = nullptr;
  int seg = 0;
  bool on_m = false;  // limits m, else n
};

// y[m, n] = a[m, k] . b[n, k]^T * row_scale[m] * col_scale[n] into f32 rows, or into panels (out.data not null), unscaled.
// a.rows a multiple of 128, b.rows of 256 (what lies past m and n is read and not used).
struct Gemm {
  Panels a, b;
  std::int64_t m = 0, n = 0;
  int terms = 1;
  View<float> y;
  const float* row_scale = nullptr;
  const float* col_scale = nullptr;
  Panels out;
  RowLimit limit;
};
void gemm(const Gemm& g, cudaStream_t stream);

// ---- prefill.cpp ---------------------------------------------------------------------------------------------------------------

// The ops of many tokens, over scratch memory of a fixed size: what does not fit at once is done in runs of tokens, bands of
// rows or groups of heads.
class Prefill {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;

  explicit Prefill(std::byte* workspace) : workspace_(workspace) {}

  // Jobs that uses_panels() refuses go to the decode kernels.
  void matmul(std::span<const MatmulJob> jobs, cudaStream_t stream) const;
  // Arguments as in Backend; uses_grouped_experts() holds.
  void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
               View<const float> weights, const ExpertWeights& w, Situ situ,
               cudaStream_t stream) const;
  // uses_expanded_mla() holds.
  void mla(View<float> o, View<const float> q, const Weight& k_b, const Weight& v_b, float scale,
           const MlaCache& cache, const BatchView& batch, cudaStream_t stream) const;
  // uses_chunked_kda() holds.
  void kda(View<float> o, View<const float> q, View<const float> k, View<const float> v,
           View<const float> g, View<const float> beta, const KdaState& state,
           const BatchView& batch, cudaStream_t stream) const;

 private:
  void matmul_group(std::span<const MatmulJob> jobs, cudaStream_t stream) const;
  void experts_run(View<float> m, View<const float> z, View<const std::int32_t> ids,
                   View<const float> weights, const ExpertWeights& w, Situ situ,
                   cudaStream_t stream) const;

  std::byte* workspace_;
};

}  // namespace k3::cuda
