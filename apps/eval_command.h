// The sub-commands of k3eval: one file each, apps/eval_<name>.cpp; k3eval.cpp lists them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/job.h"

namespace k3 {

// One command, from its options to its result. Everything but other() runs on rank 0 alone, in this order.
class EvalCommand {
 public:
  virtual ~EvalCommand() = default;

  // Reads the options; false: there is nothing to run, a page has been printed. Throws std::invalid_argument.
  virtual bool prepare(const std::vector<std::string>& args) = 0;
  // Instead of an engine: what needs no model, in one process.
  virtual void run_files() {}

  virtual const RunConfig& config() const = 0;
  // A model that runs first and makes a reference: it is gone before config()'s is loaded.
  virtual std::optional<RunConfig> other() const { return std::nullopt; }
  virtual void make_reference(Engine&) {}
  // The prompt that the log keeps, where there is one.
  virtual std::vector<std::int32_t> prompt() const { return {}; }
  virtual void run(Engine& engine, JobNotes& notes) = 0;
  // After run(): why the exit status is 1 although everything ran.
  virtual std::optional<std::string> failed() const { return std::nullopt; }
};

using MakeEval = std::unique_ptr<EvalCommand> (*)();

std::unique_ptr<EvalCommand> make_eval_logits();
std::unique_ptr<EvalCommand> make_eval_compare();
std::unique_ptr<EvalCommand> make_eval_ppl();
std::unique_ptr<EvalCommand> make_eval_parity();
std::unique_ptr<EvalCommand> make_eval_gate();
std::unique_ptr<EvalCommand> make_eval_greedy();

}  // namespace k3
