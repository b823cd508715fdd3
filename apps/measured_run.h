// One measured run as the reports see it: read from its log (results/README.md), with the name of the slot it belongs to.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace k3 {

struct MeasuredRun {
  std::string file;  // its name in the folder of results
  std::string program, started, commit;
  // Its name (apps/slot.h). Empty where the run measures nothing that a slot can hold (no benchmark of decoding, prefill or
  // loading; not finished).
  std::string slot;
  double value = 0;  // in the metric's unit
  double floor =
      0;  // what bytes and operations allow at best, in the same unit; 0: the log does not say
  bool lower_is_better = false;
  std::string model, precision;
  bool exact = false;    // the path that the others are held to
  bool checked = false;  // against the exact path:
  double top1 = 0, kld = 0;
  double compared = 0,
         replayed = 0;  // timed ids looked at, and those that an untimed replay chose too
  // A log of k3eval gate: what it says of other runs of its commit, model and precision.
  bool grades = false, grade_passed = false;
  double grade_max_kld = 0, grade_min_top1 = 0;  // the grade that was asked for
  // Device time of each phase of a step, ms a step, largest first; empty where the run was not traced.
  std::vector<std::pair<std::string, double>> phases;
  // Where the log contradicts what it claims: fewer tokens than asked for, clocks that disagree, a median that its samples
  // do not have. One line each, with what was found and what was claimed.
  std::vector<std::string> faults;
};

// Throws std::invalid_argument where the file is no log of ours or its weights are of no known quantization.
MeasuredRun read_measured(const std::string& folder, const std::string& file);

}  // namespace k3
