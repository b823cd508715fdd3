// k3eval greedy-agreement: how often two greedy texts choose the same token.
#pragma once

#include <string>
#include <vector>

#include "apps/job.h"
#include "apps/options.h"
#include "apps/stored_text.h"
#include "rank/agreement.h"

namespace k3 {

struct GreedyRequest {
  RunConfig config;                // of the run
  std::optional<RunConfig> other;  // of a second model that makes the reference
  std::string run, ref, ref_model, ids_file, ids_text;
  std::vector<StoredText> texts;  // the reference; with `other` the prompts alone, until it has run
  std::vector<StoredText> run_texts;  // --run
};

// False: there is nothing to run, a page has been printed. Throws std::invalid_argument.
bool prepare_greedy(GreedyRequest& request, const std::vector<std::string>& args);

// Two files: one process, no model. Prints the result.
void greedy_of_files(const GreedyRequest& request);

// Rank 0: the second model's greedy texts, into request.texts.
void greedy_reference(GreedyRequest& request, Engine& engine);
// Rank 0: the model against request.texts. Prints the result.
void greedy_of_run(GreedyRequest& request, Engine& engine, RunLog* log);

}  // namespace k3
