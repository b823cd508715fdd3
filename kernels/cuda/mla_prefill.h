// MLA for many tokens in the non-absorbed form, for heads of 128 + 64 key values and 128 values (kimi-k3.md section 5).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/backend.h"

namespace k3::cuda {

// Bytes it needs: fixed, and for each head of a group.
struct MlaScratch {
  std::int64_t rows = 0, toks = 0;  // padded to whole tiles
  std::int64_t fixed = 0, per_head = 0;
};
MlaScratch mla_scratch(std::int64_t n_ctx, std::int64_t kv_latent, std::int64_t n_tok);

// o[n_tok, n_head * 128] = softmax(scale * q . [k_b^T row | rope]) . (v_b row) over rows 0 .. pos of each token's slot, which
// hold the token itself. Heads go in groups as large as the scratch memory allows, at least one.
void mla_prefill(View<float> o, View<const float> q, const Weight& k_b, const Weight& v_b,
                 float scale, const MlaCache& cache, const BatchView& batch, std::byte* scratch,
                 std::size_t scratch_bytes, cudaStream_t stream);

}  // namespace k3::cuda
