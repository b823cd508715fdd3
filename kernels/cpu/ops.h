// The plain loops behind CpuBackend: the definition of each op of kernels/backend.h. `threads` is the OpenMP team.
// Results do not depend on `threads`, nor on how tokens are grouped into calls: every output element is computed by one
// thread in one fixed order.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace k3::cpu {

// Sum of a[i]*b[i] in 16 lanes, combined pairwise: the same order for every caller and instruction set.
float dot(const float* a, const float* b, std::int64_t n);

// dense (matmul.cpp)
void matmul(View<float> y, View<const float> x, const Weight& w, std::int64_t mat, int threads);
void embed(View<float> y, const BatchView& batch, const Weight& table, std::int64_t vocab_begin,
           int threads);

// residual stream (residual.cpp)
void mix_norm(View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
              std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
              float* probs, int threads);
void rms_norm(View<float> y, View<const float> x, const float* w, float eps, int threads);
void residual(View<float> x, View<const float> a, bool restart);
void copy_rows(View<float> y, View<const float> x);
void unpack_bands(View<float> a, View<float> b, View<const float> all,
                  std::span<const std::int64_t> a_widths, std::span<const std::int64_t> b_widths);
void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first);

// KDA (kda.cpp)
void kda_conv(View<float> qkv, View<const float> u, const float* conv, const KdaState& state,
              const BatchView& batch, int threads);
void l2_norm_heads(View<float> y, std::int64_t head_dim, float eps);
void kda_gates(View<float> g, View<float> beta, const float* dt, const float* a,
               std::int64_t head_dim, bool safe_gate, float lower_bound, int threads);
void kda_scan(View<float> o, View<const float> q, View<const float> k, View<const float> v,
              View<const float> g, View<const float> beta, const KdaState& state,
              const BatchView& batch, int threads);
void kda_output_gate(View<float> o, View<const float> gate, const float* w, std::int64_t head_dim,
                     float eps);

// MLA (mla.cpp)
void mla_append(View<const float> c, const float* w, float eps, const MlaCache& cache,
                const BatchView& batch);
void mla_attend(View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                const MlaCache& cache, const BatchView& batch, int threads);
void mla_attend_part(View<float> part, View<const float> q, std::int64_t n_head, float scale,
                     const MlaCache& cache, const BatchView& batch, int threads);
void mla_combine(View<float> ctx, View<const float> parts, std::int64_t n_part,
                 std::int64_t n_head);
void sigmoid_gate(View<float> y, View<const float> gate, int threads);

// MoE (moe.cpp)
void route(View<std::int32_t> ids, View<float> weights, View<const float> logits, const float* bias,
           bool normalise, float scale);
void experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
             View<const float> weights, const ExpertWeights& w, Situ situ, int threads);
void situ(View<float> g, View<const float> u, Situ p, int threads);

inline float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

}  // namespace k3::cpu
