// What the commands of k3eval read alike: ids and a model, and how ids go through it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "apps/job.h"
#include "apps/options.h"

namespace k3 {

struct EvalInput {
  RunConfig config;
  std::string ids_file, ids_text;
  // How many ids to draw from a seed where none are given, of at most `room`; empty: they must be given.
  std::function<std::int64_t(std::int64_t room)> n_seeded;
  std::vector<std::int32_t> ids;
  std::int64_t n_vocab = 0;  // of the model, once read_ids() has seen it
};

// For --ctx 0 of the commands that take ids.
inline constexpr const char* kAllIds = "as many as there are ids";

void add_input_options(Options& options, EvalInput& input);  // --model --synthetic --ids-file --ids
// --ctx and so on, --tp and so on, --log.
void add_machine_options(Options& options, RunConfig& config, const std::string& ctx_default);

// Options::parse(), its pages printed; false: a page was asked for, there is nothing to run.
bool parse_or_page(Options& options, const std::vector<std::string>& args);

// The ids of the command line or its file, held against the model's header; settles --model and --ctx. Refuses `output`
// (of the option --out) and the log in the place of an input, of which `other_input` is one more. Throws
// std::invalid_argument.
void read_ids(EvalInput& input, const Options& options, const std::string& output,
              const std::string& other_input);

// Steps that are not in the log yet.
void log_new_steps(JobNotes& notes, const Engine& engine, std::size_t& n_logged);

using RowSink = std::function<void(std::span<const float> rows, std::int64_t n_row)>;

// Rank 0: the ids through the engine from an empty state, rows to `sink`, steps to the log. Throws Interrupted where an end
// was asked for, and what `sink` threw, after the step.
void run_ids(std::span<const std::int32_t> ids, Engine& engine, JobNotes& notes,
             const RowSink& sink);

}  // namespace k3
