// Which experts each token chose, kept outside an engine, so that a run can be held to the choices of another or counted
// against them. Only ids are kept: a run's weights always come from its own router.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "rank/plan.h"

namespace k3 {

enum class ChoiceUse : std::int32_t {
  kNone,    // choices are left alone
  kRecord,  // what tokens choose is kept
  kForce,  // tokens take the experts kept for them, best first, weighed by their own router; what they would have
           // chosen is counted against these
  kCompare,  // tokens choose, and are counted against what is kept
};

// How a layer's choices fell against those kept. One token makes n_expert_used of them.
struct ChoiceCounts {
  int layer = -1;  // -1: of several
  std::int64_t choices = 0;
  std::int64_t changed = 0;       // of them, experts that the token did not have before
  std::int64_t tokens = 0;        // of several layers: each token once a layer
  std::int64_t tokens_moved = 0;  // of them, those with a changed expert

  ChoiceCounts& operator+=(const ChoiceCounts& o) {
    choices += o.choices;
    changed += o.changed;
    tokens += o.tokens;
    tokens_moved += o.tokens_moved;
    return *this;
  }
};

// Host memory of one rank, for one sequence: [position][MoE layer of the rank's stage][place among the token's experts].
class ChoiceBook {
 public:
  // Ids of positions [first, first + n), `width` of each. keep() throws std::logic_error where positions would be left out,
  // at() where one is not kept.
  void keep(std::int64_t first, std::int64_t width, std::span<const std::int32_t> ids);
  std::span<const std::int32_t> at(std::int64_t first, std::int64_t n, std::int64_t width) const;
  void clear() { ids_.clear(); }

  std::vector<ChoiceCounts> counts;  // by MoE layer, since someone last took them away

 private:
  std::vector<std::int32_t> ids_;
};

// What the layer program sees of it on one rank: device memory of one step's choices, at the same place every step, so that
// recorded steps can be repeated. Forcing needs a row of n_expert biases for each token and MoE layer.
class ChoiceTap {
 public:
  // `book` and `backend` outlive the tap. max_tok: tokens of a step at most.
  ChoiceTap(Backend& backend, const Plan& plan, int rank, std::int64_t max_tok, ChoiceUse use,
            ChoiceBook& book);

  // Around each step of tokens at positions first ... first + n_tok - 1 of one sequence. end() waits for the step; it throws
  // std::logic_error where a token did not take the experts it was held to.
  void begin(std::int64_t first, std::int64_t n_tok);
  void end();
  // Sends the layer's ids here, and holds its tokens to the ids kept where they are to be held.
  void apply(ExpertStep& step, int layer) const;

 private:
  std::vector<std::int32_t> take_ids(const DeviceBuffer& from) const;
  void count(std::span<const std::int32_t> kept, std::span<const std::int32_t> now);
  std::size_t index(int layer) const { return static_cast<std::size_t>(layer - first_layer_); }
  std::int64_t width() const { return n_moe_ * n_used_; }

  Backend& backend_;
  ChoiceUse use_;
  ChoiceBook& book_;
  int first_layer_;
  std::int64_t n_used_, n_expert_, max_tok_;
  std::int64_t n_moe_ = 0;
  std::vector<std::int64_t>
      moe_;  // by layer of the stage: its number among those with experts, or -1
  std::int64_t first_ = 0, n_tok_ = 0;
  std::vector<float> biases_;            // of the step, kForce: [MoE layer][token][expert]
  std::unique_ptr<DeviceBuffer> d_ids_;  // of the step: [MoE layer][token][place]
  std::unique_ptr<DeviceBuffer> d_biases_, d_wanted_, d_weights_;  // kForce; wanted: as d_ids_
};

}  // namespace k3
