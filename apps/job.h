// From options to a running Engine: what k3run, k3eval and k3bench do alike.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_comm.h"
#include "loader/parts.h"
#include "rank/engine.h"
#include "rank/run_log.h"

namespace k3 {

// The k3-nano.gguf of this build, or the one installed beside the program (../share/k3). Throws std::invalid_argument
// naming both places where there is none.
std::string default_model();

// --version: version_text() and the libraries' versions.
std::string full_version_text(const std::string& program);

// Rank 0's options to all, settled; nullopt on rank 0 (nothing to run) is nullopt everywhere. Collective.
std::optional<RunConfig> share_config(Comm& comm, const std::optional<RunConfig>& config);

// The CPUs that the ranks of this host may use together, shared out; at least 1. Sees the binding of each rank, so ranks
// bound to cores and ranks free to roam get the same. Collective.
int threads_per_rank(World& world, Comm& comm);

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
