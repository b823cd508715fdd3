// k3bench: how fast tokens, prompts, weights and messages go through, measured so that the numbers can be held against.
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "apps/bench_session.h"
#include "apps/build_info.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "loader/parts.h"
#include "rank/fault.h"

namespace k3 {
namespace {

// The engine of --check comes after the timed one has gone: weights are held once.
void measure_text(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                  const RunConfig& config) {
  std::vector<float> rows;
  with_bench_engine(s, world, comm, job, config, [&](Engine& engine) {
    begin_bench(s, engine);
    if (job.command == BenchJob::Command::kDecode) bench_decode(s, engine);
    if (job.command == BenchJob::Command::kPrefill) {
      s.request.reuse ? bench_reuse(s, engine) : bench_prefill(s, engine);
    }
    if (job.check > 0) rows = replay_rows(s, engine);
    if (s.log) s.log->ranks("ended", engine.reports());
  });
  if (job.check == 0) return;
  RunConfig exact = config;
  exact.precision = Precision::kExact;
  with_bench_engine(s, world, comm, job, exact,
                    [&](Engine& engine) { bench_check(s, engine, rows); });
}

void measure(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
             const RunConfig& config) {
  switch (job.command) {
    case BenchJob::Command::kDecode:
    case BenchJob::Command::kPrefill:
      measure_text(s, world, comm, job, config);
      break;
    case BenchJob::Command::kLoad:
      bench_load(s, world, comm, job, config);
      break;
    case BenchJob::Command::kCeilings:
      bench_ceilings(s, world, comm, job, config);
      break;
    case BenchJob::Command::kCollective:
      bench_collective(s, world, comm, job, config);
      break;
  }
  std::optional<Fault> fault;
  if (world.rank() == 0) fault = finish_bench(s);
  comm.agree(fault);
}

void refuse_to_replace_model(const RunConfig& config) {
  if (config.log.empty() || config.model.empty()) return;
  OpenOptions open;
  open.ignore_split_count = config.ignore_split_count;
  open.header_only = true;
  refuse_to_replace("--log", config.log, part_paths(ModelFile::open(config.model, open)));
}

std::optional<RunConfig> prepare(BenchSession& s, int argc, char** argv, World& world) {
  BenchRequest& r = s.request;
  if (!parse_bench(r, arguments(argc, argv))) return std::nullopt;
  refuse_to_replace_model(r.config);
  s.record.command = r.command_name();
  print_line(fmt::format("k3bench {} {}, {} rank{}", r.command_name(), build_info().version,
                         world.size(), world.size() == 1 ? "" : "s"));
  if (!r.config.log.empty()) {
    RunFacts facts = run_facts("k3bench", shell_quoted(argc, argv), r.config, world);
    facts.options.insert(facts.options.end(), r.options.begin(), r.options.end());
    s.log = std::make_unique<RunLog>(r.config.log, facts);
  }
  return r.config;
}

int run(int argc, char** argv, World& world, Comm& comm) {
  BenchSession s;
  return run_job(
      world, comm, s, [&] { return prepare(s, argc, argv, world); },
      [&](const RunConfig& config) {
        BenchJob job = s.request.job;
        comm.broadcast(Point::kRunConfig, std::as_writable_bytes(std::span(&job, 1)), 0);
        measure(s, world, comm, job, config);
      });
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  const std::vector<std::string> args = k3::arguments(argc, argv);
  if (k3::asks_for_page(args)) {
    return k3::page_main("k3bench", [&] {
      k3::BenchRequest request;
      k3::parse_bench(request, args);
    });
  }
  return k3::rank_main("k3bench", [&](k3::World& world, k3::Comm& comm) {
    return k3::run(argc, argv, world, comm);
  });
}
