// The ops behind CpuBackend: the definition of each op of kernels/backend.h when Ops::table is the plain one. Results do not
// depend on the number of threads, nor on how tokens are grouped into calls: every output element is computed by one thread
// in one fixed order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/elementary.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/pool.h"

namespace k3::cpu {

// Who computes, by which loops, and memory that is kept from call to call.
struct Ops {
  Pool& pool;
  const KernelTable& table;
  std::vector<RowsJob> jobs;
  std::vector<float> buffer;  // of the op that runs

  float* room(std::int64_t n) {
    if (buffer.size() < static_cast<std::size_t>(n)) buffer.resize(static_cast<std::size_t>(n));
    return buffer.data();
  }
};

// dense (matmul.cpp)
RowsJob rows_job(View<float> y, View<const float> x, const Weight& w, std::int64_t mat);
// All rows of ops.jobs, shared out between the threads.
void multiply(Ops& ops);
void matmul(Ops& ops, std::span<const MatmulJob> jobs);
void head_matmul(Ops& ops, View<float> y, std::int64_t y_head, View<const float> x,
                 std::int64_t x_head, const Weight& w);
void embed(Ops& ops, View<float> y, const BatchView& batch, const Weight& table,
           std::int64_t vocab_begin);

// residual stream (residual.cpp)
void mix_norm(Ops& ops, View<float> y, View<const float> x, const float* bank, std::int64_t n_bank,
              std::int64_t bank_stride, const float* score_w, const float* norm_w, float eps,
              float* probs);
void rms_norm(Ops& ops, View<float> y, View<const float> x, const float* w, float eps);
void residual(Ops& ops, View<float> x, View<const float> a, bool restart);
void copy_rows(View<float> y, View<const float> x);
void unpack_bands(View<float> a, View<float> b, View<const float> all,
                  std::span<const std::int64_t> a_widths, std::span<const std::int64_t> b_widths);
void note_nonfinite(View<const float> x, std::int32_t layer, std::int32_t* first);
// 1 / sqrt(mean(x^2) + eps), the sum in double as the reference does.
float inverse_rms(const KernelTable& table, const float* x, std::int64_t n, float eps);

// KDA (kda.cpp)
void kda_conv(Ops& ops, View<float> qkv, View<const float> u, const float* conv,
              const KdaState& state, const BatchView& batch);
void l2_norm_heads(Ops& ops, View<float> y, std::int64_t head_dim, float eps);
void kda_gates(Ops& ops, View<float> g, View<float> beta, const float* dt, const float* a,
               std::int64_t head_dim, bool safe_gate, float lower_bound);
void kda_scan(Ops& ops, View<float> o, View<const float> q, View<const float> k,
              View<const float> v, View<const float> g, View<const float> beta,
              const KdaState& state, const BatchView& batch);
void kda_output_gate(Ops& ops, View<float> o, View<const float> gate, const float* w,
                     std::int64_t head_dim, float eps);

// MLA (mla.cpp)
void mla_append(Ops& ops, View<const float> c, const float* w, float eps, const MlaCache& cache,
                const BatchView& batch);
void mla_attend(Ops& ops, View<float> ctx, View<const float> q, std::int64_t n_head, float scale,
                const MlaCache& cache, const BatchView& batch);
void mla_attend_part(Ops& ops, View<float> part, View<const float> q, std::int64_t n_head,
                     float scale, const MlaCache& cache, const BatchView& batch);
void mla_combine(Ops& ops, View<float> ctx, View<const float> parts, std::int64_t n_part,
                 std::int64_t n_head);
void sigmoid_gate(Ops& ops, View<float> y, View<const float> gate);

// MoE (moe.cpp)
void route(Ops& ops, View<std::int32_t> ids, View<float> weights, View<const float> logits,
           const float* bias, std::int64_t bias_stride, bool normalise, float scale);
void experts(Ops& ops, View<float> m, View<const float> z, View<const std::int32_t> ids,
             View<const float> weights, const ExpertWeights& w, Situ situ);
void situ(Ops& ops, View<float> g, View<const float> u, Situ p);

}  // namespace k3::cpu
