// What k3bench is asked to do: its command lines, and nothing that runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rank/run_config.h"
#include "rank/run_log.h"

namespace k3 {

// All ranks need it: trivially copyable, sent as it is.
struct BenchJob {
  enum class Command : std::uint8_t { kDecode, kPrefill, kLoad, kCeilings, kCollective };
  Command command = Command::kDecode;
  bool evict = false;      // load: drop the files from the page cache first
  std::int64_t check = 0;  // decode: timed tokens to hold against the exact path
  // A world of which only some ranks are there (rank/partial_comm.h); 0: all are.
  int partial_world = 0;
  int first_rank = 0;           // of those that are there
  int n_present = 1;            // 1: --solo-rank, 2: --pair
  std::int64_t most_bytes = 0;  // collective, ceilings: the largest message
  std::int64_t repeat = 1;      // of them: timed times of each
};

enum class Fill : std::uint8_t {
  kAuto,  // a real prefill up to kRealDepth positions, fabricated rows beyond
  kPrefill,
  kFabricate,
};

struct BenchRequest {
  static constexpr std::int64_t kRealDepth = 1024;
  static constexpr std::int64_t kTraced = 8;  // steps of --trace

  BenchJob job;
  RunConfig config;
  std::int64_t n_tok = 0;   // decode: timed tokens; prefill: prompt tokens
  std::int64_t depth = 0;   // positions before them
  std::int64_t warmup = 0;  // untimed tokens (decode) or repeats (prefill) first
  std::int64_t repeat = 1;  // prefill
  Fill fill = Fill::kAuto;
  std::vector<std::int32_t> ids;   // --ids: instead of seeded ones
  std::optional<double> expected;  // --predict: ms per token, tok/s or GB/s
  std::optional<double> ceiling_gb_s;
  std::optional<double> ceiling_tflops;  // prefill
  bool trace = false;  // decode, prefill: a timeline of phases, after the timed part
  bool reuse = false;  // prefill: the positions before are read once and kept
  NamedTexts options;  // of the command itself, for the log

  bool fabricates() const {
    return fill == Fill::kFabricate || (fill == Fill::kAuto && depth > kRealDepth);
  }
  const char* command_name() const;
};

// Fills in the request; false: there is nothing to run, a page has been printed. Throws std::invalid_argument.
bool parse_bench(BenchRequest& request, const std::vector<std::string>& args);

}  // namespace k3
