// The accuracy gate: a run against the exact path around prefills of given lengths, once held to the exact path's expert
// choices and once free. Two paths that agree to many digits still choose differently where experts nearly tie, and from
// there on compute different things: held, what is left is the arithmetic; free, what a user meets.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rank/bench_record.h"
#include "rank/engine.h"
#include "rank/eval.h"

namespace k3 {

struct GateOptions {
  std::vector<std::int64_t> lengths = {4, 63, 64, 512, 700, 4096, 32768};  // of prefills, rising
  std::int64_t n_before = 64;  // rows looked at inside each prefill: its last
  std::int64_t n_after = 256;  // tokens decoded after it, one a step, all of them looked at
  double max_kld = 1e-3;       // held: mean divergence, nats
  double min_top1 = 0.99;      // held: share of rows with the same likeliest token
  // Held: share of the experts of one layer that its router would have chosen otherwise.
  double max_changed = 0.05;
};

// Throws std::invalid_argument for lengths that are none or do not rise, and for bounds out of range.
void check(const GateOptions& options);
std::int64_t ids_needed(const GateOptions& options);

// Logits of the exact path where they are looked at.
class GateReference {
 public:
  GateReference(const GateOptions& options, std::int64_t n_vocab);
  // Positions wanted, in order, apart from each other.
  const std::vector<Band>& windows() const { return windows_; }
  // Whole rows, window after window.
  void append(std::span<const float> rows) { rows_.insert(rows_.end(), rows.begin(), rows.end()); }
  // Rows of positions within one window. Throws std::logic_error for others.
  std::span<const float> rows(Band positions) const;

 private:
  std::int64_t n_vocab_;
  std::vector<Band> windows_;
  std::vector<float> rows_;
};

// What one stretch of rows came to.
struct GateRow {
  std::int64_t length = 0;  // of the prefill; 0: of all of them together
  bool held = false;        // to the exact path's experts
  bool decode = false;      // rows after the prefill, else its last
  LogitComparison rows;
  std::vector<double> klds;  // by row
  // By MoE layer, of all positions that were run, also those whose logits nobody looked at. Held: what tokens would have chosen.
  std::vector<ChoiceCounts> choices;
};

// Where a run that takes minutes stands; may throw to end it between two steps.
using GateProgress = std::function<void(const std::string& where)>;

// Rank 0, every rank with its ChoiceBook (Engine::keep_choices): runs the ids through the exact path once.
GateReference gate_reference(Engine& exact, std::span<const std::int32_t> ids,
                             const GateOptions& options, const GateProgress& progress);

// Rank 0, the ranks' books as the reference left them: prefills and decodes the same ids from an empty state at every length.
// n_thread: of rank 0, for the comparison.
std::vector<GateRow> gate_rows(Engine& engine, std::span<const std::int32_t> ids,
                               const GateOptions& options, const GateReference& reference,
                               int n_thread, const GateProgress& progress);

// By what the row fails, one line each. Free rows are not judged; held ones are by divergence, top-1 and each layer's choices,
// except that the last rows of one prefill are too few for a share of tokens: for that all prefills' are taken together.
std::vector<std::string> gate_faults(const GateRow& row, const GateOptions& options);

// Table and log. Texts: one line a row of a table for people, its head first.
std::vector<std::string> gate_lines(const std::vector<GateRow>& rows);
BenchRecord gate_record(const std::vector<GateRow>& rows, const GateOptions& options);

}  // namespace k3
