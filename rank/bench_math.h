// The pure parts of a benchmark: statistics of times, bytes that a token must read, ranges of the files. No clock, no
// device, no output.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "loader/parts.h"
#include "rank/plan.h"

namespace k3 {

// Of a set of times or rates, in its own unit.
struct Spread {
  std::size_t n = 0;
  double median = 0;
  double p10 = 0;
  double p90 = 0;
  double mean = 0;
};

// The value below which the share q (0 to 1) of `sorted` (rising) lies; between two values, linearly. Throws
// std::invalid_argument where there are none, or q is no share.
double percentile(std::span<const double> sorted, double q);

// Throws std::invalid_argument where there are no values, or one is not finite.
Spread spread_of(std::span<const double> values);

// n ids of a vocabulary, the same for the same seed on every machine. Throws std::invalid_argument for n < 0 or
// n_vocab < 1.
std::vector<std::int32_t> seeded_ids(std::int64_t n, std::int64_t n_vocab, std::uint64_t seed);

// Bytes that one rank cannot but move for one decoded token, each counted once.
struct TokenBytes {
  double weights = 0;    // read
  double kda_state = 0;  // recurrent state and convolution window, read and written
  double mla_rows = 0;   // rows of the cache that attention reads, and the one it writes
  double total() const { return weights + kda_state + mla_rows; }
};

// `n_row`: positions in the cache, the token's own included. Weights: every band of the rank once, but of the routed
// experts n_expert_used / n_expert of their bytes (what an even choice gives a rank on average; an uneven one gives the
// busiest more), and of token_embd one row (which only one rank of a stage reads; counted for each). `expert_scale`: bytes of
// the routed experts over those that the plan's types give, for a file of which only the size is known.
TokenBytes token_bytes(const Plan& plan, int rank, double n_row, CacheType cache,
                       double expert_scale = 1);

// Bytes that stand one behind the other in a token's time: a stage takes as long as its busiest rank, and stages run in
// turn.
double serial_bytes(const Plan& plan, double n_row, CacheType cache, double expert_scale = 1);

// Floating-point operations of one rank for one token, two for each product and sum: every element of its matrices once, of
// the routed experts the share that is used. Without the attention over the cache, vectors, and the embedding.
struct TokenFlops {
  double layers = 0;
  double head = 0;  // the output projection: once a prompt, or once a decoded token
  double per_row =
      0;  // attention: for each row of the cache that the token sees, keys and values per head
};
TokenFlops token_flops(const Plan& plan, int rank);

// The least time in which one rank can run a prompt of n_tok tokens from `depth` positions in steps of `chunk`: for each
// step its operations over `tflops` or its bytes over `gb_s`, whichever takes longer. Bytes: the weights once, of the
// routed experts those that an even choice reaches, the KDA state in and out, the rows of the cache.
struct PrefillFloor {
  double seconds = 0;
  double flops = 0;
  double bytes = 0;
};
PrefillFloor prefill_floor(const Plan& plan, int rank, std::int64_t depth, std::int64_t n_tok,
                           std::int64_t chunk, CacheType cache, double gb_s, double tflops,
                           double expert_scale = 1);

// Spans of one name together; the longest total first.
struct PhaseTotal {
  std::string name;
  std::size_t calls = 0;
  double seconds = 0;
};
std::vector<PhaseTotal> phase_totals(std::span<const TimeSpan> spans);

// Bytes over a ceiling, ms.
double floor_ms(double bytes, double ceiling_gb_s);

// Consecutive bytes of one part of the model.
struct FileExtent {
  int part = 0;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
};

// What `rank` has to read of the files, front to back, without overlap. Gaps shorter than max_gap are read along: pages
// come from the medium whole.
std::vector<FileExtent> file_extents(const Plan& plan, const ModelFile& file, int rank,
                                     std::uint64_t max_gap = 4096);

// Extents cut into pieces of at most `most` bytes, so that several readers share them evenly.
std::vector<FileExtent> cut_extents(std::span<const FileExtent> extents, std::uint64_t most);

// Two clocks around the same work, one started outside the other: `inside` may be shorter by what lies between its parts,
// never longer but for the rates of two clocks (0.1 %). True where `inside` is within `slack` (a share) under `outside`.
bool clocks_agree(double inside_s, double outside_s, double slack);

}  // namespace k3
