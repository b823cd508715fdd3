#include "kernels/cuda/prefill.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/check_shapes.h"
#include "kernels/cuda/expert_gemm.h"
#include "kernels/cuda/kda_chunk.h"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/mla_prefill.h"
#include "kernels/cuda/ops.h"

namespace k3::cuda {
namespace {

constexpr std::int64_t kTileM = 128;  // gemm()'s
constexpr std::int64_t kTileN = 256;
constexpr std::int64_t kMaxLatent =
    16384;  // a token's latent lies in shared memory while it is gathered

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

bool is_iq1s_planes(const Weight& w) { return w.type == BlockType::kIQ1_S && w.layout == kPlanes; }

bool whole_octets(const Weight& w) { return w.n_in % 8 == 0 && w.first % 8 == 0; }

// Hands out scratch memory, 1024-byte aligned; with no base it only measures.
class Carve {
 public:
  explicit Carve(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t n) {
    auto* at = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(n * static_cast<std::int64_t>(sizeof(T)), 1024);
    return at;
  }
  Panels panels(std::int64_t rows, std::int64_t n_panel) {
    return {take<__half>(rows * n_panel * kPanel), rows, n_panel};
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* base_;
  std::int64_t used_ = 0;
};

// Everything the grouped product needs for n_tok tokens.
struct ExpertScratch {
  ExpertRows rows;
  Panels x, hidden, out;
};

ExpertScratch expert_scratch(Carve& c, std::int64_t n_tok, std::int64_t k, const ExpertWeights& w) {
  ExpertScratch s;
  const std::int64_t n_choice = n_tok * k, n_expert = w.gate->n_mat,
                     rows = max_expert_rows(n_choice, n_expert);
  s.rows.counts = c.take<std::int32_t>(n_expert);
  s.rows.begin = c.take<std::int32_t>(n_expert);
  s.rows.row_of = c.take<std::int32_t>(n_choice);
  s.rows.tiles = c.take<int4>(max_expert_tiles(n_choice, n_expert));
  s.rows.n_tile = c.take<std::int32_t>(1);
  s.rows.scale = c.take<float>(rows);
  s.hidden = c.panels(rows, slot_panels(w.gate->n_out));
  // The inputs are done with when the outputs are written.
  const std::int64_t in = slot_panels(w.gate->n_in), out = panel_count(w.down->n_out);
  s.x = c.panels(rows, std::max(in, out));
  s.out = {s.x.data, rows, out};
  s.x.n_panel = in;
  return s;
}

// situ(g, u) is at most beta * lambda: this power of two brings it near the top of f16's range, away from its smallest values.
float hidden_factor(const Situ& p) {
  if (p.lambda <= 0 || p.beta <= 0) return 1.0f;
  return std::ldexp(1.0f, std::clamp(14 - std::ilogb(p.beta * p.lambda), -14, 14));
}

}  // namespace

int panel_terms(BlockType type) { return type == BlockType::kF32 ? 3 : 1; }

bool uses_panels(const Weight& w, std::int64_t n_tok) {
  return n_tok >= kMinPanelTok && !w.empty() && whole_octets(w);
}

bool uses_grouped_experts(const ExpertWeights& w, std::int64_t n_tok) {
  return n_tok >= kMinPanelTok && !w.gate->empty() && !w.down->empty() && is_iq1s_planes(*w.gate) &&
         is_iq1s_planes(*w.up) && is_iq1s_planes(*w.down) && w.gate->first == w.up->first &&
         w.gate->n_in <= kMaxLatent && w.down->n_out % 8 == 0;
}

bool uses_expanded_mla(const Weight& k_b, const Weight& v_b, const MlaCache& cache,
                       const BatchView& batch, std::size_t workspace_bytes) {
  if (batch.n_tok <= kMaxAbsorbedTok * std::max<std::int64_t>(1, batch.n_seg)) return false;
  if (k_b.empty() || v_b.empty() || cache.shard.n_part > 1) return false;
  const MlaScratch s = mla_scratch(cache.n_ctx, cache.kv_latent, batch.n_tok);
  return k_b.n_in == 128 && cache.rope == 64 && v_b.n_out == 128 && cache.kv_latent % kPanel == 0 &&
         whole_octets(k_b) && whole_octets(v_b) && !has_row_scale(v_b.type) &&
         s.fixed + s.per_head <= static_cast<std::int64_t>(workspace_bytes);
}

bool uses_chunked_kda(const KdaState& state, const BatchView& batch, View<const float> qkv,
                      View<const float> g) {
  const auto aligned = [](const View<const float>& v) {
    return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.stride % 4 == 0;
  };
  return state.head_dim == kKdaDim && batch.n_tok >= kMinPanelTok &&
         batch.n_tok >= 2 * kKdaChunk * batch.n_seg && aligned(qkv) && aligned(g) &&
         kda_chunk_floats(batch.n_tok, batch.n_seg, state.n_head) * 4 <=
             static_cast<std::int64_t>(Prefill::kBytes);
}

bool uses_parallel_conv(const KdaState& state, const BatchView& batch) {
  return state.conv_kernel <= 8 && batch.n_tok >= kMinPanelTok &&
         batch.n_tok >= 2 * kKdaChunk * batch.n_seg;
}

void Prefill::matmul(std::span<const MatmulJob> jobs, cudaStream_t stream) const {
  std::vector<MatmulJob> rest, group;
  std::vector<bool> done(jobs.size());
  for (const MatmulJob& j : jobs) check_shapes(j);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (done[i]) continue;
    if (!uses_panels(*jobs[i].w, jobs[i].x.rows)) {
      rest.push_back(jobs[i]);
      continue;
    }
    // Jobs of one x and one number of terms share its panels.
    group.clear();
    for (std::size_t k = i; k < jobs.size(); ++k) {
      const MatmulJob& j = jobs[k];
      if (done[k] || j.x.data != jobs[i].x.data || j.x.stride != jobs[i].x.stride ||
          j.x.rows != jobs[i].x.rows || j.x.cols != jobs[i].x.cols ||
          panel_terms(j.w->type) != panel_terms(jobs[i].w->type) || !uses_panels(*j.w, j.x.rows)) {
        continue;
      }
      done[k] = true;
      group.push_back(j);
    }
    matmul_group(group, stream);
  }
  if (!rest.empty()) cuda::matmul(rest, stream);
}

// Runs of tokens so that x's panels take half of the workspace at most; bands of each weight's rows in the rest.
void Prefill::matmul_group(std::span<const MatmulJob> jobs, cudaStream_t stream) const {
  const View<const float> x = jobs[0].x;
  const int terms = panel_terms(jobs[0].w->type);
  const std::int64_t n_panel = panel_count(x.cols) * (terms == 3 ? 2 : 1),
                     row_bytes = n_panel * kPanelRow + 4;
  const auto budget = static_cast<std::int64_t>(kBytes) - 8192;
  const std::int64_t run =
      std::min(round_up(x.rows, kTileM), budget / 2 / row_bytes / kTileM * kTileM);
  if (run < kTileM) throw DeviceError("matmul: a tile of x does not fit the workspace");
  Carve carve(workspace_);
  const Panels a = carve.panels(run, n_panel);
  auto* a_scale = carve.take<float>(run);
  const std::int64_t band = (budget - carve.used()) / row_bytes / kTileN * kTileN;
  if (band < kTileN) throw DeviceError("matmul: a tile of the weight does not fit the workspace");
  auto* b_scale = carve.take<float>(band);
  auto* b_data = carve.take<__half>(band * n_panel * kPanel);
  for (std::int64_t t = 0; t < x.rows; t += run) {
    const std::int64_t n_tok = std::min(run, x.rows - t);
    to_panels(a, a_scale, x.slice(t, n_tok), terms, stream);
    for (const MatmulJob& job : jobs) {
      for (std::int64_t r = 0; r < job.w->n_out; r += band) {
        const std::int64_t n = std::min(band, job.w->n_out - r);
        Gemm g;
        g.a = a;
        g.b = {b_data, round_up(n, kTileN), n_panel};
        weight_to_panels(g.b, b_scale, *job.w, 0, r, n, terms, stream);
        g.m = n_tok;
        g.n = n;
        g.terms = terms;
        g.y = job.y.slice(t, n_tok).columns(r, n);
        g.row_scale = a_scale;
        g.col_scale = has_row_scale(job.w->type) ? b_scale : nullptr;
        gemm(g, stream);
      }
    }
  }
}

void Prefill::experts(View<float> m, View<const float> z, View<const std::int32_t> ids,
                      View<const float> weights, const ExpertWeights& w, Situ situ,
                      cudaStream_t stream) const {
  std::int64_t run = m.rows;
  for (;; run = (run + 1) / 2) {
    Carve measure(nullptr);
    expert_scratch(measure, run, ids.cols, w);
    if (measure.used() <= static_cast<std::int64_t>(kBytes)) break;
    if (run == 1) throw DeviceError("experts: one token does not fit the workspace");
  }
  for (std::int64_t t = 0; t < m.rows; t += run) {
    const std::int64_t n = std::min(run, m.rows - t);
    experts_run(m.slice(t, n), z.slice(t, n), ids.slice(t, n), weights.slice(t, n), w, situ,
                stream);
  }
}

void Prefill::experts_run(View<float> m, View<const float> z, View<const std::int32_t> ids,
                          View<const float> weights, const ExpertWeights& w, Situ situ,
                          cudaStream_t stream) const {
  Carve carve(workspace_);
  const ExpertScratch s = expert_scratch(carve, m.rows, ids.cols, w);
  const float factor = hidden_factor(situ);
  sort_by_expert(s.rows, ids, w.expert_begin, w.gate->n_mat, stream);
  gather_latents(s.x, s.rows, z, ids.cols, stream);
  experts_in(s.hidden, s.x, s.rows, *w.gate, *w.up, situ, factor, stream);
  experts_out(s.out, s.hidden, s.rows, *w.down, 1.0f / factor, stream);
  reduce_experts(m, s.out, s.rows, weights, stream);
}

void Prefill::mla(View<float> o, View<const float> q, const Weight& k_b, const Weight& v_b,
                  float scale, const MlaCache& cache, const BatchView& batch,
                  cudaStream_t stream) const {
  mla_prefill(o, q, k_b, v_b, scale, cache, batch, workspace_, kBytes, stream);
}

void Prefill::kda(View<float> o, View<const float> q, View<const float> k, View<const float> v,
                  View<const float> g, View<const float> beta, const KdaState& state,
                  const BatchView& batch, cudaStream_t stream) const {
  kda_chunks(o, q, k, v, g, beta, state, batch, reinterpret_cast<float*>(workspace_), stream);
}

}  // namespace k3::cuda
