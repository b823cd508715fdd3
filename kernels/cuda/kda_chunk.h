// KDA for many tokens: the gated delta rule in chunks of 16 (the WY form with a decay for every key channel), state and sums
// in f32; and the convolution with its tokens in parallel. Formulas: kimi-k3.md section 4 and arXiv 2510.26692.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/backend.h"

namespace k3::cuda {

constexpr std::int64_t kKdaChunk = 16;  // tokens
constexpr std::int64_t kKdaDim = 128;   // channels of a head

// Floats of scratch memory that kda_chunks() needs.
inline std::int64_t kda_chunk_floats(std::int64_t n_tok, std::int64_t n_seg, std::int64_t n_head) {
  return (n_tok / kKdaChunk + n_seg + 1) * n_head * 2 * kKdaChunk * kKdaChunk;
}

// As Backend::kda_scan, for heads of kKdaDim.
void kda_chunks(View<float> o, View<const float> q, View<const float> k, View<const float> v,
                View<const float> g, View<const float> beta, const KdaState& state,
                const BatchView& batch, float* scratch, cudaStream_t stream);

// As Backend::kda_conv, for at most 8 taps; the same bits.
void kda_conv_tokens(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
                     const BatchView& batch, cudaStream_t stream);

}  // namespace k3::cuda
