#include "apps/bench_session.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "apps/launch_main.h"
#include "apps/raw_read.h"
#include "loader/parts.h"
#include "rank/fault.h"

namespace k3 {
namespace {

// One rank's raw read, in a shape that travels. Shares are -1 where the system does not say.
struct RawReport {
  double seconds = 0;
  double bytes = 0;
  double cached_before_load = -1;
  double cached_before_raw = -1;
};

std::vector<std::string> part_paths(const RunConfig& config) {
  OpenOptions open;
  open.ignore_split_count = config.ignore_split_count;
  open.header_only = true;
  std::vector<std::string> paths;
  const ModelFile file = ModelFile::open(config.model, open);
  for (const PartInfo& p : file.parts()) paths.push_back(p.path);
  return paths;
}

// The page cache as the next reading will find it.
double settle_cache(Comm& comm, const std::vector<std::string>& paths, bool drop) {
  together(comm, [&] {
    if (drop) evict(paths);
  });
  double share = -1;
  together(comm, [&] { share = cached_share(paths).value_or(-1); });
  return share;
}

std::string share_text(double share) {
  return share < 0 ? "unknown" : fmt::format("{:.0f} %", 100 * share);
}

void record_load(BenchSession& s, const std::vector<RankReport>& loads,
                 const std::vector<RawReport>& raws) {
  double load_s = 0, raw_s = 0, plan = 0;
  std::vector<double> plan_bytes, load_rate, raw_seconds, raw_bytes, raw_rate, load_cached,
      raw_cached;
  s.say(fmt::format("{:>5} {:>10} {:>9} {:>9} {:>9} {:>9} {:>11} {:>11}", "rank", "plan GB",
                    "load s", "GB/s", "raw s", "raw GB/s", "cached load", "cached raw"));
  for (std::size_t r = 0; r < loads.size(); ++r) {
    const auto bytes = static_cast<double>(loads[r].plan_bytes);
    plan += bytes;
    load_s = std::max(load_s, loads[r].load_s);
    raw_s = std::max(raw_s, raws[r].seconds);
    plan_bytes.push_back(bytes);
    load_rate.push_back(bytes / loads[r].load_s / 1e9);
    raw_seconds.push_back(raws[r].seconds);
    raw_bytes.push_back(raws[r].bytes);
    raw_rate.push_back(bytes / raws[r].seconds / 1e9);
    load_cached.push_back(raws[r].cached_before_load);
    raw_cached.push_back(raws[r].cached_before_raw);
    s.say(fmt::format("{:>5} {:>10.4f} {:>9.3f} {:>9.3f} {:>9.3f} {:>9.3f} {:>11} {:>11}", r,
                      bytes / 1e9, loads[r].load_s, load_rate.back(), raws[r].seconds,
                      raw_rate.back(), share_text(load_cached.back()),
                      share_text(raw_cached.back())));
  }
  s.record.number("plan_bytes", plan);
  s.record.number("load_s", load_s);
  s.record.number("load_gb_s", plan / load_s / 1e9);
  s.record.number("raw_s", raw_s);
  s.record.number("raw_gb_s", plan / raw_s / 1e9);
  s.record.number("load_over_raw", raw_s / load_s);
  s.record.column("plan_bytes", plan_bytes);
  s.record.column("load_gb_s", load_rate);
  s.record.column("raw_s", raw_seconds);
  s.record.column("raw_bytes", raw_bytes);
  s.record.column("raw_gb_s", raw_rate);
  s.record.column("cached_before_load", load_cached);
  s.record.column("cached_before_raw", raw_cached);
  s.say(fmt::format(
      "load: {:.4f} GB in {:.3f} s, {:.3f} GB/s; raw read of the same in {:.3f} s, {:.3f} GB/s; "
      "loading runs at {:.1f} % of it",
      plan / 1e9, load_s, plan / load_s / 1e9, raw_s, plan / raw_s / 1e9, 100 * raw_s / load_s));
  record_prediction(s, plan / load_s / 1e9, "GB/s");
}

// All ranks, after the engine has let go of the files.
void run_raw(BenchSession& s, Comm& comm, const BenchJob& job, int n_thread,
             const std::vector<std::string>& paths, const std::vector<FileExtent>& extents,
             RawReport mine, const std::vector<RankReport>& loads) {
  mine.cached_before_raw = settle_cache(comm, paths, job.evict);
  together(comm, [&] {
    const RawRead raw = raw_read(paths, extents, n_thread);
    mine.seconds = raw.seconds;
    mine.bytes = static_cast<double>(raw.bytes);
  });
  std::vector<RawReport> all;
  for (const auto& bytes :
       comm.gather_bytes(Point::kResidency, std::as_bytes(std::span(&mine, 1)), 0)) {
    RawReport r;
    std::memcpy(&r, bytes.data(), sizeof r);
    all.push_back(r);
  }
  if (comm.rank() == 0) record_load(s, loads, all);
}

}  // namespace

void bench_load(BenchSession& s, World& world, Comm& comm, const BenchJob& job,
                const RunConfig& config) {
  std::vector<std::string> paths;
  together(comm, [&] { paths = part_paths(config); });
  RawReport raw;
  raw.cached_before_load = settle_cache(comm, paths, job.evict);
  std::vector<FileExtent> extents;
  std::vector<RankReport> loads;
  // The plan goes with the engine, and the files must be let go before they are read again.
  with_bench_engine(
      s, world, comm, job, config,
      [&](Engine& engine) {
        loads = begin_bench(s, engine);
        if (s.log) s.log->ranks("ended", engine.reports());
      },
      [&](const Engine& engine) {
        extents = file_extents(engine.plan(), engine.file(), world.rank());
      });
  run_raw(s, comm, job, config.threads, paths, extents, raw, loads);
}

}  // namespace k3
