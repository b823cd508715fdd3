#include "apps/bench_session.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <system_error>

#include <fmt/core.h>

#include "apps/build_info.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/partial_comm.h"

namespace k3 {

// Not the clock that the engine times its steps by.
double outside_clock_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC_RAW, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void log_steps(BenchSession& s, const Engine& engine, RunLog::Phase phase) {
  const std::vector<StepTiming>& all = engine.timings();
  for (; s.n_logged < all.size(); ++s.n_logged) {
    if (s.log) s.log->step(phase, all[s.n_logged]);
  }
}

double seconds_of_steps(const Engine& engine, std::size_t from) {
  double sum = 0;
  for (std::size_t i = from; i < engine.timings().size(); ++i) sum += engine.timings()[i].seconds;
  return sum;
}

void stop_if_asked(const Engine& engine, const std::string& where) {
  if (stop_asked() || engine.stop_requested()) throw Interrupted("stopped on request " + where);
}

// Runs ids through; the token drawn after them.
Decision run_ids(BenchSession& s, Engine& engine, std::span<const std::int32_t> ids) {
  return engine.extend(0, ids, engine.config().sampler, 0, false, [&](const Progress& p) {
    s.show(p);
    if (p.done < p.total) {
      stop_if_asked(engine, fmt::format("after {} of {} prompt tokens", p.done, p.total));
    }
  });
}

std::vector<std::int32_t> bench_ids(const BenchSession& s, const Engine& engine, std::int64_t n) {
  return s.request.ids.empty() ? seeded_ids(n, engine.model().n_vocab, engine.config().sampler.seed)
                               : s.request.ids;
}

// What both kinds of filling say of themselves.
std::string fill_text(const BenchRequest& r) {
  if (r.depth == 0) return "empty";
  if (r.fabricates()) {
    return "fabricated rows: seeded values that no token wrote; ids drawn after them mean nothing";
  }
  return r.ids.empty() ? "a real prefill of seeded ids" : "a real prefill of the given ids";
}

void record_spread(BenchRecord& record, const Spread& spread, const std::string& unit,
                   double scale) {
  record.number("median_" + unit, scale * spread.median);
  record.number("p10_" + unit, scale * spread.p10);
  record.number("p90_" + unit, scale * spread.p90);
  record.number("mean_" + unit, scale * spread.mean);
}

void record_clocks(BenchSession& s, double inside, double outside, const char* what) {
  const bool agree = clocks_agree(inside, outside, kClockSlack);
  s.record.number("inside_s", inside);
  s.record.number("outside_s", outside);
  s.record.text("clocks", agree ? "agree" : "disagree");
  s.say(fmt::format(
      "clocks: {} {:.3f} ms by the steps, {:.3f} ms by a second clock around them: {}", what,
      1e3 * inside, 1e3 * outside,
      agree
          ? "agree"
          : fmt::format("DISAGREE (expected 0 to {:.0f} % between the steps)", 100 * kClockSlack)));
}

void record_prediction(BenchSession& s, double measured, const char* unit) {
  if (!s.request.expected) return;
  const double expected = *s.request.expected;
  s.record.number("predicted", expected);
  s.record.text("predicted_unit", unit);
  s.record.number("measured_over_predicted", measured / expected);
  s.say(fmt::format("predicted {:.4g} {}, measured {:.4g}: {:.3f} times that", expected, unit,
                    measured, measured / expected));
}

// What the ranks were priced at before loading against what they then held: the worst of them.
void record_residency(BenchSession& s, const std::vector<RankReport>& reports) {
  double held_off = 0, taken_off = 0, priced_sum = 0, taken_sum = 0;
  for (const RankReport& r : reports) {
    const auto priced = static_cast<double>(r.priced_bytes),
               taken = static_cast<double>(r.taken_bytes),
               held = static_cast<double>(r.weight_bytes - r.mapped_bytes + r.state_bytes +
                                          r.work_bytes);
    held_off = std::max(held_off, std::abs(held / priced - 1));
    if (taken > 0) taken_off = std::max(taken_off, std::abs(taken / priced - 1));
    priced_sum += priced;
    taken_sum += taken;
  }
  s.record.number("priced_bytes", priced_sum);
  s.record.number("allocated_off_price", held_off);
  std::string line =
      fmt::format("memory: priced at {:.4f} GB before loading; allocated: {:.3f} % off",
                  priced_sum / 1e9, 100 * held_off);
  if (taken_sum > 0) {
    s.record.number("taken_bytes", taken_sum);
    s.record.number("taken_off_price", taken_off);
    line += fmt::format("; taken from the devices: {:.4f} GB, {:.3f} % off", taken_sum / 1e9,
                        100 * taken_off);
  }
  s.say(line);
}

void record_model(BenchSession& s, const Engine& engine, const std::vector<RankReport>& reports) {
  const std::string fingerprint = engine.file().fingerprint();
  BenchRecord& record = s.record;
  const std::string name = engine.file().parts().front().path;
  record.text("model", name);
  record.text("weights", engine.config().synthetic.empty() ? "of the file" : name);
  record.text("model_name", engine.model().name);
  record.text("fingerprint", fingerprint);
  record.text("commit", build_info().commit);
  record.text("build_type", build_info().build_type);
  std::string devices;
  for (const RankReport& r : reports)
    devices += (r.rank == 0 ? "" : "; ") + fmt::format("rank {}: {}: {}", r.rank, r.host, r.device);
  record.text("devices", devices);
  for (const auto& [name, value] : describe(engine.config())) {
    const bool ours = std::any_of(s.request.options.begin(), s.request.options.end(),
                                  [&, &n = name](const auto& o) { return o.first == n; });
    if (!ours) record.text("option_" + name, value);
  }
  for (const auto& [name, value] : s.request.options) record.text("option_" + name, value);
  record.number("world", static_cast<double>(reports.size()));
  record.number("n_layer", static_cast<double>(engine.model().n_layer));
  std::vector<double> load_s;
  for (const RankReport& r : reports) load_s.push_back(r.load_s);
  record.column("load_s", load_s);
  s.say(fmt::format(
      "k3bench {}: {}, {} layers, fingerprint {}, {} rank{}, tp {} x pp {}, cache {}, commit {}",
      record.command, name, engine.model().n_layer, fingerprint, reports.size(),
      reports.size() == 1 ? "" : "s", engine.config().layout.tp, engine.config().layout.pp,
      engine.config().cache == CacheType::kF32   ? "f32"
      : engine.config().cache == CacheType::kF16 ? "f16"
                                                 : "bf16",
      build_info().commit));
  const BenchJob& job = s.request.job;
  if (job.partial_world > 0) {
    const std::string scope =
        job.n_present == 1
            ? fmt::format(
                  "rank {} of {} alone: its text means nothing, its times exclude the network",
                  job.first_rank, job.partial_world)
            : fmt::format(
                  "ranks 0 and 1 of {}: the others' parts are missing, the text means "
                  "nothing, the network is that of two",
                  job.partial_world);
    record.text("scope", scope);
    s.say("PARTIAL WORLD: " + scope);
  } else {
    record.text("scope", "all ranks");
  }
  for (const RankReport& r : reports) {
    s.say(fmt::format(
        "rank {}: {}: {}; weights {:.4f} GB, state {:.4f} GB, work {:.4f} GB, loaded in {:.3f} s",
        r.rank, r.host, r.device, static_cast<double>(r.weight_bytes) / 1e9,
        static_cast<double>(r.state_bytes) / 1e9, static_cast<double>(r.work_bytes) / 1e9,
        r.load_s));
  }
  record_residency(s, reports);
}

std::vector<RankReport> begin_bench(BenchSession& s, Engine& engine) {
  for (const std::string& w : engine.warnings()) print_line("warning: " + w);
  const std::vector<RankReport> loads = engine.reports();
  if (s.log) {
    s.log->chosen(engine.config());
    s.log->model(engine.file(), engine.model());
    s.log->warnings(engine.warnings());
    s.log->ranks("loaded", loads);
  }
  record_model(s, engine, loads);
  return loads;
}

void bench_trace(BenchSession& s, Engine& engine, const std::function<void()>& steps) {
  engine.trace(true);
  steps();
  const std::vector<TimeSpan> spans = engine.take_trace();
  engine.trace(false);
  BenchTable timeline, phases;
  timeline.name = "timeline";
  timeline.in_json = false;
  phases.name = "phases";
  for (const TimeSpan& t : spans) {
    timeline.text("name", t.name);
    timeline.number("layer", t.layer);
    timeline.number("begin_ms", 1e3 * t.begin_s);
    timeline.number("ms", 1e3 * t.seconds);
  }
  double total = 0;
  const std::vector<PhaseTotal> totals = phase_totals(spans);
  for (const PhaseTotal& p : totals) total += p.seconds;
  s.say(fmt::format("trace, rank {}, without a graph, times of the device:",
                    s.request.job.first_rank));
  s.say(fmt::format("{:<16} {:>7} {:>10} {:>9} {:>7}", "phase", "calls", "total ms", "us each",
                    "share"));
  for (const PhaseTotal& p : totals) {
    phases.text("name", p.name);
    phases.number("calls", static_cast<double>(p.calls));
    phases.number("total_ms", 1e3 * p.seconds);
    phases.number("share", p.seconds / total);
    s.say(fmt::format("{:<16} {:>7} {:>10.3f} {:>9.2f} {:>6.1f}%", p.name, p.calls, 1e3 * p.seconds,
                      1e6 * p.seconds / static_cast<double>(p.calls), 100 * p.seconds / total));
  }
  s.record.tables.push_back(std::move(phases));
  s.record.tables.push_back(std::move(timeline));
}

// ---- an engine --------------------------------------------------------------------------------------------------------

namespace {

void publish(BenchSession& s) {
  std::string text;
  for (const std::string& line : s.lines) text += line + "\n";
  text += "RESULT_JSON " + bench_json(s.record) + "\n";
  s.show.finish();
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw std::system_error(errno ? errno : EIO, std::generic_category(), "standard output");
  }
}

void check_presence(const BenchJob& job, int n_rank) {
  if (job.partial_world == 0 || n_rank == job.n_present) return;
  throw std::invalid_argument(fmt::format("{}: needs {} rank{}, this job has {}",
                                          job.n_present == 1 ? "--solo-rank" : "--pair",
                                          job.n_present, job.n_present == 1 ? "" : "s", n_rank));
}

}  // namespace

void with_bench_engine(BenchSession& s, World& world, Comm& control, const BenchJob& job,
                       const RunConfig& config, const std::function<void(Engine&)>& work,
                       const std::function<void(const Engine&)>& everywhere) {
  together(control, [&] { check_presence(job, world.size()); });
  const RankDevice device = make_rank_device(config, world, control);
  Comm& data = device.comm(control);
  std::unique_ptr<PartialComm> partial;
  if (job.partial_world > 0) {
    data.set_time_limit(config.time_limit_s);
    together(control, [&] {
      partial =
          std::make_unique<PartialComm>(data, job.first_rank, job.partial_world, *device.backend);
    });
  }
  Engine engine(config, partial ? *partial : data, *device.backend, [&](const Progress& p) {
    if (world.rank() == 0) s.show(p);
    if (stop_asked()) throw Interrupted("stopped on request while loading");
  });
  if (everywhere) everywhere(engine);
  std::optional<Fault> fault;
  if (world.rank() == 0) {
    fault = guarded(engine, [&] { work(engine); });
  } else {
    engine.serve();
  }
  control.agree(fault);
}

std::optional<Fault> finish_bench(BenchSession& s) {
  std::optional<Fault> fault;
  if (s.log) s.log->bench(s.record);
  try {
    publish(s);
  } catch (...) {
    fault = fault_of(std::current_exception());
  }
  return close_log(s, fault, fault ? "" : "all measured");
}

}  // namespace k3
