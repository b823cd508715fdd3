// One rank, whole: model file, plan, weights, state, forward pass, and the protocol by which rank 0 drives the others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "kernels/backend.h"
#include "rank/config.h"
#include "rank/expert_choices.h"
#include "rank/run_config.h"
#include "rank/sampler.h"

namespace k3 {

class ModelFile;
class Plan;

// Where a long operation stands. Loading calls on every rank, which may throw to end the job (all ranks then agree on that);
// prefill calls on rank 0.
struct Progress {
  enum class Phase { kLoad, kPrefill };
  Phase phase;
  std::uint64_t done = 0;  // bytes (load) or tokens (prefill)
  std::uint64_t total = 0;
  double seconds = 0;  // since the phase began
};
using ProgressFn = std::function<void(const Progress&)>;

// What one rank says of itself for the log.
struct RankReport {
  int rank = 0;
  std::string host;
  std::string device;
  std::uint64_t plan_bytes = 0;    // what the plan says this rank reads
  std::uint64_t weight_bytes = 0;  // weights on the device (mapped file bytes included)
  std::uint64_t state_bytes = 0;   // KDA state, conv windows, MLA cache
  std::uint64_t work_bytes = 0;    // activations
  std::uint64_t mapped_bytes = 0;  // of weight_bytes: read where the file is mapped
  std::uint64_t priced_bytes = 0;  // weights, state and activations as priced before loading
  std::uint64_t taken_bytes = 0;   // that the device's free memory shrank by; 0 on the CPU
  std::uint64_t rss_bytes = 0;     // resident set of the process, now
  std::uint64_t peak_rss_bytes = 0;
  double load_s = 0;
  // Of the stage's MoE layers, the same on all its ranks; each report takes them away.
  std::vector<ChoiceCounts> choices;
  std::vector<PointStats> points;  // world and group communicators together, indexed by Point
};

// Times of the slowest rank are what rank 0 sees: a step ends when its candidates have arrived.
struct StepTiming {
  std::int64_t n_tok = 0;
  double seconds = 0;
};

// One sequence's part of a step that several share.
struct StepPart {
  int slot = 0;                       // no slot twice in a step
  std::span<const std::int32_t> ids;  // appended to its sequence; at least one
  bool generated = false;             // ids were drawn, not given (see Engine::extend)
  bool wants_token = true;            // false: more of the prompt follows
  SamplerOptions sampler;             // of this sequence alone, as is `draw`
  std::uint64_t draw = 0;
};

// Raised on rank 0 when a logit is NaN or infinite: names the first layer whose output was not finite.
class NonFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Engine {
 public:
  // Collective over `world`. Plans, prices, checks that all ranks opened the same model, loads; all ranks or none:
  // a fault anywhere throws AgreedFault everywhere. `backend` outlives the engine.
  Engine(const RunConfig& config, Comm& world, Backend& backend, const ProgressFn& progress = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const RunConfig& config() const;  // with every 0 ("choose for me") replaced by what was chosen
  const ModelConfig& model() const;
  const ModelFile& file() const;
  const Plan& plan() const;
  const std::vector<std::string>& warnings() const;  // dialects met, stale counts ignored

  // What this rank's expert choices are kept in and taken from (use_choices); outlives the engine.
  void keep_choices(ChoiceBook& book);

  // Ranks other than 0: does what rank 0 says until it says stop. Returns the exit code that came with it.
  int serve();

  // ---- rank 0 only ------------------------------------------------------------------------------------------------
  // Starts a new, empty sequence in the slot.
  void reset(int slot);
  // Makes the slot hold `length` positions of seeded random state and cache rows that no token wrote: for benchmarks at
  // depth. What is generated after it means nothing. Throws std::invalid_argument when n_ctx has no room for one more.
  void fabricate(int slot, std::int64_t length, std::uint64_t seed);
  // Lets slot `to` hold the sequence of slot `from` too; from then on the two go their own ways. Costs a copy of the KDA state
  // and of the cache rows in use, on the device.
  void fork(int from, int to);
  // Keeps the slot's sequence in host memory, each rank its part, under the number returned; restore() puts it into any slot,
  // as often as wanted; forget() drops it. Throws std::invalid_argument for a number that is not kept.
  std::uint64_t save(int slot);
  void restore(std::uint64_t saved, int slot);
  void forget(std::uint64_t saved);
  // The same on disk, for this or another layout (rank/session.h): `ids` are all that the sequence has read, and what load()
  // returns. An error is AgreedFault on every rank and ends the job.
  void store(int slot, const std::string& path, std::span<const std::int32_t> ids);
  std::vector<std::int32_t> load(int slot, const std::string& path);
  // Positions held by the slot's sequence.
  std::int64_t length(int slot) const;
  // Appends ids to the sequence in chunks and draws the next token from the last position's logits. Throws
  // std::invalid_argument for ids outside the vocabulary or a sequence longer than n_ctx, before anything runs.
  // `draw` numbers the token within the sequence: same seed and draw, same noise, whatever the layout. Prompt ids
  // (`generated` false) count for the repetition penalty only, generated ones for the presence penalty as well.
  Decision extend(int slot, std::span<const std::int32_t> ids, const SamplerOptions& sampler,
                  std::uint64_t draw, bool generated, const ProgressFn& progress = {});
  // Appends every part's ids to its sequence and draws each one's next token, as extend() would for it alone. Parts may be of
  // any length and depth, together at most chunk_tok ids. One Decision a part, in order; of a part that wants no token only
  // the default. Throws std::invalid_argument as extend() does, before anything runs.
  // A part whose values are not finite any more gets a decision of kind kNotFinite (nonfinite_text() says it in words), the
  // others go on; its slot refuses everything but reset(), restore() and fork() into it.
  std::vector<Decision> step(std::span<const StepPart> parts);
  std::string nonfinite_text(const Decision& decision, int slot) const;
  // Appends ids and gives rows of logits [rows, n_vocab] to `sink`, chunk by chunk: of every id, or of the last one only.
  void logits(int slot, std::span<const std::int32_t> ids, bool last_only,
              const std::function<void(std::span<const float> rows, std::int64_t n_row)>& sink,
              const ProgressFn& progress = {});
  // The same for the last n_row ids, or all where there are fewer.
  void last_logits(int slot, std::span<const std::int32_t> ids, std::int64_t n_row,
                   const std::function<void(std::span<const float> rows, std::int64_t n_row)>& sink,
                   const ProgressFn& progress = {});
  // From now on all ranks record expert choices in their books, are held to those there, or compare with them. Counts come
  // with reports(). Throws std::logic_error where a rank has no book.
  void use_choices(ChoiceUse use);
  // Marks the phases of this rank's steps from now on, or no more; then what was marked since the last call. Waits.
  void trace(bool on);
  std::vector<TimeSpan> take_trace();
  // Collective through the protocol: every rank's report.
  std::vector<RankReport> reports();
  // True once any rank has been asked to stop (see request_stop).
  bool stop_requested() const;
  // Ends serve() on all other ranks, which return exit_code. The destructor sends it (0, or 1 while an error unwinds) if
  // nobody did before; not after a failure in the middle of a step, when the ranks no longer agree on what comes next.
  void stop(int exit_code = 0);

  // ---- any rank, from a signal handler ------------------------------------------------------------------------------
  // Asks for an end after the current step; rank 0 learns of it with the next step's candidates.
  static void request_stop() noexcept;

  const std::vector<StepTiming>& timings()
      const;             // of every forward step since clear_timings(), rank 0
  void clear_timings();  // a run without end would fill the memory

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
