// Launchers of the CUDA kernels, one file per op family. All work is queued on `stream`; arguments as in kernels/backend.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace k3::cuda {

// matmul.cu
// Whether this build has code that the current device can run.
bool has_code_for_device();
// one_tile: the kernel for many tokens, for one as well: the order of a token's sums is then always the same.
void matmul(std::span<const MatmulJob> jobs, cudaStream_t stream, bool one_tile = false);
void head_matmul(View<float> y, std::int64_t y_head, View<const float> x, std::int64_t x_head,
                 const Weight& w, cudaStream_t stream, bool one_tile = false);
void embed(View<float> y, const BatchView& batch, const Weight& table, std::int64_t vocab_begin,
           cudaStream_t stream);

// repack.cu: n_row rows of the file's blocks, from_pitch bytes apart, to w's planes at `to` (w.row_bytes apart).
void repack(std::byte* to, const std::byte* from, std::int64_t from_pitch, std::int64_t n_row,
            const Weight& w, cudaStream_t stream);

// synth.cu: n_row rows of a synthetic tensor's blocks, as a file would hold them, to_pitch bytes apart.
struct SynthRows {
  SynthTensor recipe;
  std::int64_t first_block = 0;  // of the tensor, in row 0
  std::int64_t stride = 0;       // blocks from one row to the next
  std::int64_t n_block = 0;      // blocks of a row that are wanted
  int block_bytes = 0;
};
void synth_rows(std::byte* to, std::int64_t to_pitch, std::int64_t n_row, const SynthRows& rows,
                cudaStream_t stream);

// residual.cu
void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
              std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
              float* probs, cudaStream_t stream);
void rms_norm(View<float> y, View<const float> x, const float* w, float eps, cudaStream_t stream);
void residual(View<float> x, View<const float> a, bool restart, cudaStream_t stream);
void copy_rows(View<float> y, View<const float> x, cudaStream_t stream);
void unpack_bands(View<float> a, View<float> b, View<const float> all,
                  std::span<const std::int64_t> a_widths, std::span<const std::int64_t> b_widths,
                  cudaStream_t stream);
void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first,
                    cudaStream_t stream);
void penalise(View<float> logits, std::int64_t vocab_begin, const std::int32_t* history,
              std::int64_t n_hist, float repetition, float presence, cudaStream_t stream);

// kda.cu
void kda_conv(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
              const BatchView& batch, cudaStream_t stream);
void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps, cudaStream_t stream);
void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
               std::int64_t head_dim, bool safe_gate, float lower_bound, cudaStream_t stream);
void kda_scan(View<float> o, View<const float> q, View<const float> k, View<const float> v,
              View<const float> g, View<const float> beta, const KdaState& state,
              const BatchView& batch, cudaStream_t stream);
void kda_output_gate(View<float> o, View<const float> gate, const float* w, std::int64_t head_dim,
                     float eps, cudaStream_t stream);

// mla.cu; partial: device scratch of mla_scratch_floats(...) floats
std::size_t mla_scratch_floats();
void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                const BatchView& batch, cudaStream_t stream);
// one_split: a cache is cut into as many parts whatever the number of tokens.
void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                const MlaCache& cache, const BatchView& batch, float* partial, cudaStream_t stream,
                bool one_split = false);
void mla_rope_part(View<float> q_abs, View<const float> q, std::int64_t n_head, std::int64_t nope,
                   std::int64_t kv_latent, std::int64_t rope, cudaStream_t stream);
void sigmoid_gate(View<float> y, View<const float> gate, cudaStream_t stream);

// ---- the fast path's decode step; each returns false, and does nothing, where it has no kernel for the shapes -----------

// gemv.cu
inline constexpr std::size_t kMaxProducts = 8;  // of one launch
bool has_gemv(const Weight& w);  // whether rows of this type and layout have a kernel there
bool fused_products(std::span<const Operand> operands, std::span<const FusedProduct> products,
                    cudaStream_t stream);
// decode_mix.cu
bool fused_mix(const MixStep& step, cudaStream_t stream);
// decode_kda.cu
bool fused_kda(const KdaStep& step, const KdaState& state, const BatchView& batch,
               cudaStream_t stream);
// decode_moe.cu; parts: expert_scratch_floats() floats; arrived: zeros, one for each of the device's blocks
std::size_t expert_scratch_floats();
bool fused_experts(const ExpertStep& step, float* hidden, std::size_t hidden_floats, float* parts,
                   unsigned* arrived, cudaStream_t stream);
// mla_parts.cu
void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head, float scale,
                     const MlaCache& cache, const BatchView& batch, cudaStream_t stream);
void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part, std::int64_t n_head,
                 cudaStream_t stream);

// moe.cu; hidden: device scratch of hidden_floats floats
void route(View<std::int32_t> ids, View<float> weights, View<const float> logits, const float* bias,
           std::int64_t bias_stride, bool normalise, float scale, cudaStream_t stream);
void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
             View<const float> weights, const ExpertWeights& w, Situ situ, float* hidden,
             std::size_t hidden_floats, cudaStream_t stream);
void situ(View<float> g, View<const float> u, Situ p, cudaStream_t stream);

}  // namespace k3::cuda
