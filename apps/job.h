// From options to a running Engine: what k3run, k3eval and k3bench do alike.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/cpus.h"
#include "apps/progress.h"
#include "comm/mpi_comm.h"
#include "loader/parts.h"
#include "rank/engine.h"
#include "rank/run_log.h"

namespace k3 {

// What rank 0 shows of a job and writes of it.
struct JobNotes {
  ProgressPrinter show;
  std::unique_ptr<RunLog> log;  // null: none asked for
};

// A job from its options to its end: `prepare` on rank 0 (nothing: there is nothing to run), its options to all, then `work`
// on all. An error of `work` closes the log and goes on. Collective.
int run_job(World& world, Comm& comm, JobNotes& notes,
            const std::function<std::optional<RunConfig>()>& prepare,
            const std::function<void(const RunConfig&)>& work);

// An engine over all ranks while rank 0 is in `drive` and the others serve; then all agree on what `drive` returned. `look`:
// on every rank before. Collective.
void with_engine(World& world, Comm& comm, JobNotes& notes, const RunConfig& config,
                 const std::function<std::optional<Fault>(Engine&)>& drive,
                 const std::function<void(Engine&)>& look = {});

// Rank 0, around all that it does with an engine. Errors that leave the ranks between two steps, from where they can end in
// order, become the fault; others fly. The engine's other ranks are told to stop.
std::optional<Fault> guarded(Engine& engine, const std::function<void()>& work);

// Prints an engine's warnings, and puts what is known before its first step into the log, if there is one.
void begin_notes(JobNotes& notes, Engine& engine);

// The end of a job that `fault` does not say otherwise of: closes the log, if there is one. The fault to end with: a log
// that could not be written is one, unless there is a graver.
std::optional<Fault> close_log(JobNotes& notes, const std::optional<Fault>& fault,
                               const std::string& reason);

// The k3-nano.gguf of this build, or the one installed beside the program (../share/k3). Throws std::invalid_argument
// naming both places where there is none.
std::string default_model();

// --version: version_text() and the libraries' versions.
std::string full_version_text(const std::string& program);

// Rank 0's options to all, settled; nullopt on rank 0 (nothing to run) is nullopt everywhere. Collective.
std::optional<RunConfig> share_config(Comm& comm, const std::optional<RunConfig>& config);

RunFacts run_facts(const std::string& program, const std::string& command_line,
                   const RunConfig& config, const World& world);

// Whole text of a file; "-" is standard input. Throws std::system_error naming it.
std::string read_text(const std::string& path);

// Every part of the model.
std::vector<std::string> part_paths(const ModelFile& file);

// An output that is one of the inputs, by whatever name, would be lost before or while it is read: throws
// std::invalid_argument naming both. Empty names and files that are not there do not count.
void refuse_to_replace(const std::string& option, const std::string& output,
                       const std::vector<std::string>& inputs);

// Blank-separated ids. Throws std::invalid_argument naming `where` and the first word that is no id.
std::vector<std::int32_t> parse_ids(const std::string& text, const std::string& where);

// Throws std::invalid_argument naming `where` and the first id outside the vocabulary.
void check_ids(const std::vector<std::int32_t>& ids, std::int64_t n_vocab,
               const std::string& where);

}  // namespace k3
