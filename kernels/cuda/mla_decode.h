// Attention over the latent cache for few tokens, on tensor cores (kernels/cuda/mla_choice.h says when).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/backend.h"
#include "kernels/cuda/mla_choice.h"

namespace k3::cuda {

// Whether this build has the sm_90a code.
bool has_mla_decode();

// Absorbed queries, [n_tok, n_head * (512 + 64)]. Their last 64 values of each head are read from `rope`, head h of token t
// at rope.row(t) + h * rope_head: there, or where they were before absorption.
struct MlaQueries {
  View<const float> latent;
  View<const float> rope;
  std::int64_t rope_head = 0;
};
inline MlaQueries absorbed(View<const float> q, std::int64_t kv_latent, std::int64_t rope) {
  return {q, q.columns(kv_latent, rope), kv_latent + rope};
}

// The shape that choose_mla() asks for, of a call on the current device.
MlaShape mla_shape(const MlaQueries& q, std::int64_t n_head, const MlaCache& cache,
                   const BatchView& batch, int cc);

// Either the result (Backend::mla_attend) or what a rank knows of its share of the rows (Backend::mla_attend_part).
struct MlaOut {
  View<float> ctx;
  bool part = false;
};

// scratch: device memory of scratch_bytes for what blocks know of their rows; n_block: the device's multiprocessors.
void mla_decode(MlaOut out, const MlaQueries& q, float scale, const MlaCache& cache,
                const BatchView& batch, const MlaChoice& choice, int n_head, int n_block,
                std::byte* scratch, std::size_t scratch_bytes, cudaStream_t stream);

}  // namespace k3::cuda
