// Routed experts for many tokens: choices sorted by expert, one grouped product for gate and up with situ behind it, one for
// down, a sum in the order of choice. Every expert's weights are decoded once per tile of at most 96 of its tokens; nothing
// is padded beyond 8 rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/panels.h"

namespace k3::cuda {

constexpr int kMaxTile = 96;     // tokens of one expert that share a decoded weight
constexpr int kSlotBlock = 128;  // columns within which the order below permutes

// The grouped product decodes weights straight into the registers that the tensor cores read: a thread's elements of a
// k-step are not neighbours there, but groups of the file are. So the columns of its operands lie permuted within blocks of
// 128: slot s holds element element_of_slot(s); a thread's slots are one group of 32, octet by octet, in an octet the order
// 0 2 1 3 4 6 5 7 in which IQ1_S's codes come out two at a time. A sum over columns does not mind their order.
inline __host__ __device__ std::int64_t element_of_slot(std::int64_t slot) {
  const int s = static_cast<int>(slot % kSlotBlock);
  const int octet = s / 32, pair = s % 32 / 8, thread = s % 8 / 2, odd = s % 2;
  return slot - s + thread * 32 + octet * 8 + pair / 2 * 4 + pair % 2 + 2 * odd;
}

// Panels of a width in slots: whole blocks.
inline std::int64_t slot_panels(std::int64_t n) { return (n + kSlotBlock - 1) / kSlotBlock * 2; }

// Tables on the device; rows: of the sorted panels.
struct ExpertRows {
  std::int32_t* counts = nullptr;  // [n_expert] choices of each
  std::int32_t* begin = nullptr;   // [n_expert] first row of each
  std::int32_t* row_of =
      nullptr;            // [n_tok * k] row of a choice, -1 where its expert is not on this rank
  int4* tiles = nullptr;  // expert, first row, rows
  std::int32_t* n_tile = nullptr;
  float* scale = nullptr;  // per row: what undoes the scale of its latent
};

// Bounds known before routing.
inline std::int64_t max_expert_rows(std::int64_t n_choice, std::int64_t n_expert) {
  const std::int64_t used = n_choice < n_expert ? n_choice : n_expert;
  return (n_choice + 7 * used + 7) / 8 * 8 + kMaxTile;
}
inline std::int64_t max_expert_tiles(std::int64_t n_choice, std::int64_t n_expert) {
  return n_choice / kMaxTile + (n_choice < n_expert ? n_choice : n_expert);
}

void sort_by_expert(const ExpertRows& rows, View<const std::int32_t> ids, std::int64_t begin,
                    std::int64_t n_expert, cudaStream_t stream);
// z in slot order to the rows of each token's choices; to.n_panel = slot_panels(z.cols).
void gather_latents(Panels to, const ExpertRows& rows, View<const float> z, std::int64_t k,
                    cudaStream_t stream);
// hidden (slot order) = situ(gate . x, up . x) * out_scale
void experts_in(Panels hidden, Panels x, const ExpertRows& rows, const Weight& gate,
                const Weight& up, Situ situ, float out_scale, cudaStream_t stream);
// out (natural order) = down . hidden * out_scale
void experts_out(Panels out, Panels hidden, const ExpertRows& rows, const Weight& down,
                 float out_scale, cudaStream_t stream);
// m[t] = sum over the token's choices of weight * its row.
void reduce_experts(View<float> m, Panels from, const ExpertRows& rows, View<const float> weights,
                    cudaStream_t stream);

}  // namespace k3::cuda
