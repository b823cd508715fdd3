// A plan in words and in JSON.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "rank/plan.h"

namespace k3 {

// Tensors of one kind, for sums of bytes.
enum class TensorClass : std::uint8_t {
  kExperts,    // routed experts
  kAttention,  // KDA and MLA matrices, convolutions, decay
  kShared,     // shared experts
  kLatent,     // routed_down, routed_up
  kRouter,
  kDense,  // dense feed-forward layers
  kVocab,  // token_embd, output
  kNorms,  // norms and residual scores
  kCount,
};
const char* class_name(TensorClass c);
TensorClass class_of(Role role);

struct RankCost {
  std::array<std::uint64_t, static_cast<std::size_t>(TensorClass::kCount)>
      bytes{};                // read, whole blocks
  std::uint64_t total = 0;    // sum of bytes
  std::uint64_t premium = 0;  // of total, blocks cut through
};
RankCost rank_cost(const Plan& plan, int rank);

struct PlanTitle {
  std::string model;  // a file or a shape
  std::string quant;  // of a shape
};

// Tables: what each rank holds, its bytes, its collectives in a step; with `rank`, its part of every tensor as well.
std::string plan_table(const Plan& plan, const PlanTitle& title, std::optional<int> rank);
// The same as one JSON object. Bands are [begin, end); of a layer's bands the first layer of each kind is shown.
std::string plan_json(const Plan& plan, const PlanTitle& title, std::optional<int> rank);

}  // namespace k3
