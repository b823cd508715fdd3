// What k3bench's commands share on rank 0: the request, the log, the record, and lines for people.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/bench_request.h"
#include "apps/device.h"
#include "apps/job.h"
#include "rank/bench_math.h"
#include "rank/bench_record.h"
#include "rank/engine.h"
#include "rank/run_log.h"

namespace k3 {

inline constexpr double kClockSlack = 0.05;  // sampling and bookkeeping between two steps

// Rank 0's share of a run.
struct BenchSession : JobNotes {
  BenchRequest request;
  BenchRecord record;
  std::vector<std::string> lines;  // for people
  std::size_t n_logged = 0;        // of the engine's steps

  void say(std::string line) { lines.push_back(std::move(line)); }
};

// Not the clock that the engine times its steps by.
double outside_clock_s();
double unix_time_s();

// The engine's steps since the last call, into the log.
void log_steps(BenchSession& s, const Engine& engine, RunLog::Phase phase);
double seconds_of_steps(const Engine& engine, std::size_t from);
// Throws Interrupted.
void stop_if_asked(const Engine& engine, const std::string& where);

// Runs ids through; the token drawn after them.
Decision run_ids(BenchSession& s, Engine& engine, std::span<const std::int32_t> ids);
// n seeded ids, or those that were given.
std::vector<std::int32_t> bench_ids(const BenchSession& s, const Engine& engine, std::int64_t n);
// What both kinds of filling say of themselves.
std::string fill_text(const BenchRequest& r);

// median_<unit>, p10_, p90_, mean_; values times scale.
void record_spread(BenchRecord& record, const Spread& spread, const std::string& unit,
                   double scale);
void record_clocks(BenchSession& s, double inside, double outside, const char* what);
void record_prediction(BenchSession& s, double measured, const char* unit);
void record_model(BenchSession& s, const Engine& engine, const std::vector<RankReport>& reports);

// A few more steps, marked: the table of phases and the timeline.
void bench_trace(BenchSession& s, Engine& engine, const std::function<void()>& steps);

// ---- the commands -----------------------------------------------------------------------------------------------------
// Rank 0, with the others serving.
void bench_decode(BenchSession& s, Engine& engine);
void bench_prefill(BenchSession& s, Engine& engine);
void bench_reuse(BenchSession& s, Engine& engine);
// The first --check timed ids again, from the same state, given to the engine one by one: the logits that chose them.
std::vector<float> replay_rows(BenchSession& s, Engine& engine);
// Holds such rows of the timed path against `exact`'s.
void bench_check(BenchSession& s, Engine& exact, const std::vector<float>& rows);
// All ranks.
void bench_load(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                const RunConfig& config);
void bench_ceilings(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                    const RunConfig& config);
void bench_collective(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                      const RunConfig& config);

// What is known before the first step, printed and logged. Rank 0.
std::vector<RankReport> begin_bench(BenchSession& s, Engine& engine);
// Prints the lines and RESULT_JSON, and closes the log. Rank 0.
std::optional<Fault> finish_bench(BenchSession& s);
// An engine over all ranks, or over those of a larger world that are there, while rank 0 is in `work` and the others serve.
// everywhere: on every rank before. Collective.
void with_bench_engine(BenchSession& s, World& world, Comm& control, const BenchJob& job,
                       const RunConfig& config, const std::function<void(Engine&)>& work,
                       const std::function<void(const Engine&)>& everywhere = {});

}  // namespace k3
