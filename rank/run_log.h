// The HDF5 log of a run, written by rank 0. One schema for every program; results/README.md is its description.
//
// The file is kept in memory and put on the disk whole, every few seconds and at the end: whatever kills the process, the
// path holds a file that opens and lacks the last seconds at most. A disk that fills up does not stop the run: the
// snapshot before stays, and trouble() tells.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rank/bench_record.h"
#include "rank/engine.h"

namespace k3 {

using NamedTexts = std::vector<std::pair<std::string, std::string>>;

// What is known before the model is opened.
struct RunFacts {
  std::string program;
  std::string command_line;
  NamedTexts options;    // describe(RunConfig) and the program's own, as the user gave them
  NamedTexts build;      // version, commit, build_type, flags, compiler, cuda
  NamedTexts libraries;  // mpi, hdf5, nccl
  std::string launcher;
  std::string job;  // the scheduler's id or empty
  int world = 1;
};

struct RunLogOptions {
  double period_s =
      3;  // between snapshots while there is news; with the time to write one this stays under 5 s
};

// Every call may come from any thread; one lock guards all of them (HDF5 is not safe for threads).
class RunLog {
 public:
  // Puts the first snapshot on the disk, so that a path that cannot be written is refused (std::system_error) before
  // anything else is done.
  RunLog(std::string path, const RunFacts& facts, const RunLogOptions& options = {});
  // Without close() before, the state stays "running"; the last snapshot is still taken.
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  void model(const ModelFile& file, const ModelConfig& config);
  // The options with every 0 replaced by what was chosen.
  void chosen(const RunConfig& config);
  void warnings(const std::vector<std::string>& lines);
  // `when`: "loaded" or "ended", once each.
  void ranks(const std::string& when, std::span<const RankReport> reports);
  // Ids given to the model; in a chat once a turn, the ids that the turn adds.
  void prompt(std::span<const std::int32_t> ids);
  // The end of a chat's turn: ids drawn since its prompt, and the reply's finish reason.
  void reply(std::int64_t n_token, const std::string& finish_reason);
  // A forward step that just ended.
  enum class Phase { kPrefill = 0, kDecode = 1 };
  void step(Phase phase, const StepTiming& timing);
  // A generated token that just came; seconds since the one before, or since the prompt's ids were accepted.
  void token(const Decision& token, double seconds);
  // A number of the summary, unit in the name: "ttft_ms".
  void summary(const std::string& name, double value);
  // What a benchmark found: group "bench". Once.
  void bench(const BenchRecord& record);

  // "finished", "interrupted" or "failed". `reason`: why generation ended ("eos", "length", ...); `line`: the error. Takes
  // the last snapshot. Later calls, of any kind, change nothing.
  void close(const std::string& state, const std::string& reason, const std::string& line = {});

  // Why the newest snapshot is not on the disk: one line; nothing when it is.
  std::optional<std::string> trouble() const;
  const std::string& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

inline constexpr const char* kRunSchema = "k3-run";
inline constexpr int kRunSchemaVersion = 1;

}  // namespace k3
