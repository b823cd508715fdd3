// k3eval parity: whether a run computes what its reference does, at every depth of a text.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rank/engine.h"
#include "rank/eval.h"

namespace k3 {

struct ParityRequest {
  std::string ref;                 // file of logits; empty: `other` makes them
  std::optional<RunConfig> other;  // the same model on the exact path
  double min_top1 = 0.95;
  double max_kld = 0.05;
  std::vector<float> rows;  // of `other`
};

// 4, 8, 16, ... under n, and n itself. Throws std::invalid_argument for n < 4.
std::vector<std::int64_t> parity_depths(std::int64_t n);

// Checks the gates, and that a reference file fits: its rows are those of the first ids, which are cut to as many. Throws
// std::invalid_argument.
void check_parity(const ParityRequest& request, std::int64_t n_vocab,
                  std::vector<std::int32_t>& ids);

// Rank 0: the reference's logits of all ids.
void parity_reference(ParityRequest& request, Engine& engine, std::span<const std::int32_t> ids);

// Rank 0: runs every prefix from an empty state and holds its rows against the reference's. Prints one JSON object. What to
// say where the worst depth does not pass.
std::optional<std::string> parity_of_run(const ParityRequest& request, Engine& engine,
                                         std::span<const std::int32_t> ids,
                                         const std::function<void(std::int64_t depth)>& before);

}  // namespace k3
