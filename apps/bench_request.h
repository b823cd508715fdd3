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
  enum class Command : std::uint8_t { kDecode, kPrefill, kLoad };
  Command command = Command::kDecode;
  bool evict = false;  // load: drop the files from the page cache first
};

enum class Fill : std::uint8_t {
  kAuto,  // a real prefill up to kRealDepth positions, fabricated rows beyond
  kPrefill,
  kFabricate,
};

struct BenchRequest {
  static constexpr std::int64_t kRealDepth = 1024;

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
  NamedTexts options;  // of the command itself, for the log

  bool fabricates() const {
    return fill == Fill::kFabricate || (fill == Fill::kAuto && depth > kRealDepth);
  }
  const char* command_name() const;
};

// Fills in the request; false: there is nothing to run, a page has been printed. Throws std::invalid_argument.
bool parse_bench(BenchRequest& request, const std::vector<std::string>& args);

}  // namespace k3
