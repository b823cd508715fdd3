// k3bench: how fast tokens, prompts and weights go through, measured so that the numbers can be held against.
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/core.h>

#include "apps/bench_request.h"
#include "apps/build_info.h"
#include "apps/device.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/progress.h"
#include "apps/raw_read.h"
#include "loader/parts.h"
#include "rank/bench_math.h"
#include "rank/fault.h"

namespace k3 {
namespace {

constexpr double kClockSlack = 0.05;  // sampling and bookkeeping between two steps

// Rank 0's share of a run.
struct Session {
  BenchRequest request;
  std::unique_ptr<RunLog> log;
  ProgressPrinter show;
  BenchRecord record;
  std::vector<std::string> lines;  // for people
  std::size_t n_logged = 0;        // of the engine's steps

  void say(std::string line) { lines.push_back(std::move(line)); }
};

// Not the clock that the engine times its steps by.
double outside_clock_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC_RAW, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double unix_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void log_steps(Session& s, const Engine& engine, RunLog::Phase phase) {
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
Decision run_ids(Session& s, Engine& engine, std::span<const std::int32_t> ids) {
  return engine.extend(0, ids, engine.config().sampler, 0, false, [&](const Progress& p) {
    s.show(p);
    if (p.done < p.total) {
      stop_if_asked(engine, fmt::format("after {} of {} prompt tokens", p.done, p.total));
    }
  });
}

std::vector<std::int32_t> ids_of(const Session& s, const Engine& engine, std::int64_t n) {
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

void record_clocks(Session& s, double inside, double outside, const char* what) {
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

void record_prediction(Session& s, double measured, const char* unit) {
  if (!s.request.expected) return;
  const double expected = *s.request.expected;
  s.record.number("predicted", expected);
  s.record.text("predicted_unit", unit);
  s.record.number("measured_over_predicted", measured / expected);
  s.say(fmt::format("predicted {:.4g} {}, measured {:.4g}: {:.3f} times that", expected, unit,
                    measured, measured / expected));
}

// ---- decode ---------------------------------------------------------------------------------------------------------

// Leaves --depth positions in the slot; the token drawn after them.
Decision fill_decode(Session& s, Engine& engine) {
  const BenchRequest& r = s.request;
  engine.reset(0);
  if (!r.fabricates()) {
    const std::vector<std::int32_t> ids = ids_of(s, engine, r.depth);
    if (s.log) s.log->prompt(ids);
    return run_ids(s, engine, ids);
  }
  // The last position is a token's own, for its logits begin the text.
  if (r.depth > 1) engine.fabricate(0, r.depth - 1, engine.config().sampler.seed);
  return run_ids(s, engine, ids_of(s, engine, 1));
}

void record_floors(Session& s, const Engine& engine, double n_row, double seconds) {
  const std::optional<double> ceiling = s.request.ceiling_gb_s;
  const double serial = serial_bytes(engine.plan(), n_row, engine.config().cache);
  s.record.number("bytes_per_token", serial);
  s.record.number("achieved_gb_s", serial / seconds / 1e9);
  if (ceiling) {
    s.record.number("ceiling_gb_s", *ceiling);
    s.record.number("floor_ms", floor_ms(serial, *ceiling));
    s.record.number("floor_over_median", floor_ms(serial, *ceiling) / (1e3 * seconds));
  }
  std::vector<double> weights, kda, mla, total, rate, floors;
  s.say(fmt::format("{:>5} {:>12} {:>12} {:>12} {:>12} {:>10} {:>10}", "rank", "weights MB",
                    "KDA r+w MB", "MLA rows MB", "total MB", "GB/s", ceiling ? "floor ms" : ""));
  for (int rank = 0; rank < engine.plan().layout().world(); ++rank) {
    const TokenBytes b = token_bytes(engine.plan(), rank, n_row, engine.config().cache);
    weights.push_back(b.weights);
    kda.push_back(b.kda_state);
    mla.push_back(b.mla_rows);
    total.push_back(b.total());
    rate.push_back(b.total() / seconds / 1e9);
    if (ceiling) floors.push_back(floor_ms(b.total(), *ceiling));
    s.say(fmt::format("{:>5} {:>12.3f} {:>12.3f} {:>12.3f} {:>12.3f} {:>10.2f} {:>10}", rank,
                      b.weights / 1e6, b.kda_state / 1e6, b.mla_rows / 1e6, b.total() / 1e6,
                      rate.back(), ceiling ? fmt::format("{:.3f}", floors.back()) : ""));
  }
  s.record.column("token_weight_bytes", weights);
  s.record.column("token_kda_bytes", kda);
  s.record.column("token_mla_bytes", mla);
  s.record.column("token_bytes", total);
  s.record.column("achieved_gb_s", rate);
  if (ceiling) s.record.column("floor_ms", floors);
  s.say(
      fmt::format("a token moves at least {:.3f} MB one after another ({} stage{}), {:.2f} GB/s{}",
                  serial / 1e6, engine.plan().layout().pp,
                  engine.plan().layout().pp == 1 ? "" : "s", serial / seconds / 1e9,
                  ceiling ? fmt::format("; floor {:.3f} ms at {} GB/s, {:.1f} % of the median",
                                        floor_ms(serial, *ceiling), *ceiling,
                                        0.1 * floor_ms(serial, *ceiling) / seconds)
                          : ""));
}

struct Timed {
  std::vector<Decision> tokens;
  std::vector<double> seconds;
  double outside_s = 0;
};

// n tokens greedily, each fed back. Nothing else happens between two of them.
Timed draw_tokens(Session& s, Engine& engine, Decision before, std::int64_t n,
                  std::uint64_t first_draw) {
  Timed t;
  t.tokens.reserve(static_cast<std::size_t>(n));
  const std::size_t from = engine.timings().size();
  const double begin = outside_clock_s();
  for (std::int64_t i = 0; i < n; ++i) {
    stop_if_asked(engine, fmt::format("after {} of {} tokens", i, n));
    const std::int32_t id = t.tokens.empty() ? before.id : t.tokens.back().id;
    t.tokens.push_back(engine.extend(0, std::span(&id, 1), engine.config().sampler,
                                     first_draw + static_cast<std::uint64_t>(i), true));
  }
  t.outside_s = outside_clock_s() - begin;
  for (std::size_t i = from; i < engine.timings().size(); ++i)
    t.seconds.push_back(engine.timings()[i].seconds);
  log_steps(s, engine, RunLog::Phase::kDecode);
  for (std::size_t i = 0; s.log && i < t.tokens.size(); ++i)
    s.log->token(t.tokens[i], t.seconds[i]);
  return t;
}

void run_decode(Session& s, Engine& engine) {
  const BenchRequest& r = s.request;
  const double fill_begin = outside_clock_s();
  const Decision first = fill_decode(s, engine);
  s.record.number("fill_s", outside_clock_s() - fill_begin);
  log_steps(s, engine, RunLog::Phase::kPrefill);
  s.record.untimed_ids.push_back(first.id);
  const Timed warm = draw_tokens(s, engine, first, r.warmup, 1);
  for (const Decision& d : warm.tokens) s.record.untimed_ids.push_back(d.id);
  const std::int64_t begin_position = engine.length(0);
  const double began = unix_time_s();
  const Timed timed = draw_tokens(s, engine, r.warmup > 0 ? warm.tokens.back() : first, r.n_tok,
                                  static_cast<std::uint64_t>(r.warmup) + 1);
  const double ended = unix_time_s();
  for (const Decision& d : timed.tokens) s.record.ids.push_back(d.id);
  s.record.seconds = timed.seconds;

  const Spread spread = spread_of(timed.seconds);
  const double inside = spread.mean * static_cast<double>(spread.n);
  s.record.text("state", fill_text(r));
  s.record.number("n", static_cast<double>(spread.n));
  s.record.number("depth", static_cast<double>(r.depth));
  s.record.number("warmup", static_cast<double>(r.warmup));
  s.record.number("first_position", static_cast<double>(begin_position));
  record_spread(s.record, spread, "ms", 1e3);
  s.record.number("tok_s", 1 / spread.median);
  s.record.number("began_unix_s", began);
  s.record.number("ended_unix_s", ended);
  s.say(fmt::format("depth {}: {}; {} tokens of warm-up follow", r.depth, fill_text(r), r.warmup));
  s.say(
      fmt::format("decode, {} tokens from position {}: median {:.3f} ms, p10 {:.3f}, p90 {:.3f}, "
                  "mean {:.3f}; {:.2f} tok/s",
                  spread.n, begin_position, 1e3 * spread.median, 1e3 * spread.p10, 1e3 * spread.p90,
                  1e3 * spread.mean, 1 / spread.median));
  record_clocks(s, inside, timed.outside_s, "all timed tokens");
  // Rows that the mean timed token reads, its own included.
  record_floors(s, engine,
                static_cast<double>(begin_position) + 0.5 * static_cast<double>(r.n_tok + 1),
                spread.median);
  record_prediction(s, 1e3 * spread.median, "ms per token");
}

// ---- prefill --------------------------------------------------------------------------------------------------------

void fill_prefill(Session& s, Engine& engine) {
  const BenchRequest& r = s.request;
  engine.reset(0);
  if (r.depth == 0) return;
  if (r.fabricates()) return engine.fabricate(0, r.depth, engine.config().sampler.seed);
  run_ids(s, engine, seeded_ids(r.depth, engine.model().n_vocab, engine.config().sampler.seed + 1));
}

void run_prefill(Session& s, Engine& engine) {
  const BenchRequest& r = s.request;
  const std::vector<std::int32_t> ids = ids_of(s, engine, r.n_tok);
  if (s.log) s.log->prompt(ids);
  double inside = 0, outside = 0;
  for (std::int64_t i = 0; i < r.warmup + r.repeat; ++i) {
    stop_if_asked(engine, fmt::format("after {} of {} times", i, r.warmup + r.repeat));
    fill_prefill(s, engine);
    const std::size_t from = engine.timings().size();
    const double begin = outside_clock_s();
    const Decision d = run_ids(s, engine, ids);
    const double ttft = outside_clock_s() - begin;
    log_steps(s, engine, RunLog::Phase::kPrefill);
    if (i < r.warmup) {
      s.record.untimed_ids.push_back(d.id);
      continue;
    }
    s.record.ids.push_back(d.id);
    s.record.seconds.push_back(ttft);
    outside += ttft;
    inside += seconds_of_steps(engine, from);
  }
  const bool same = std::all_of(s.record.ids.begin(), s.record.ids.end(),
                                [&](std::int32_t id) { return id == s.record.ids.front(); });
  std::vector<double> rates;
  for (const double t : s.record.seconds) rates.push_back(static_cast<double>(r.n_tok) / t);
  const Spread rate = spread_of(rates);
  const Spread ttft = spread_of(s.record.seconds);
  s.record.text("state", fill_text(r));
  s.record.text("first_ids", same ? "equal" : "differ");
  s.record.number("n", static_cast<double>(rate.n));
  s.record.number("tokens", static_cast<double>(r.n_tok));
  s.record.number("chunk", static_cast<double>(engine.config().chunk_tok));
  s.record.number("depth", static_cast<double>(r.depth));
  record_spread(s.record, rate, "tok_s", 1);
  record_spread(s.record, ttft, "ttft_ms", 1e3);
  s.say(fmt::format("depth {}: {}", r.depth, fill_text(r)));
  s.say(
      fmt::format("prefill, {} tokens in chunks of {}, {} times: median {:.2f} tok/s, p10 {:.2f}, "
                  "p90 {:.2f}; TTFT {:.3f} ms",
                  r.n_tok, engine.config().chunk_tok, rate.n, rate.median, rate.p10, rate.p90,
                  1e3 * ttft.median));
  if (!same)
    s.say("DIFFERENT first ids from the same prompt: the repeats did not compute the same");
  record_clocks(s, inside, outside, "all repeats");
  record_prediction(s, rate.median, "tok/s");
}

// ---- load -----------------------------------------------------------------------------------------------------------

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

void record_load(Session& s, const std::vector<RankReport>& loads,
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
void run_raw(Session& s, Comm& comm, const BenchJob& job, int n_thread,
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

// ---- all ------------------------------------------------------------------------------------------------------------

void record_model(Session& s, const Engine& engine, const std::vector<RankReport>& reports) {
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
  for (const RankReport& r : reports) {
    s.say(fmt::format(
        "rank {}: {}: {}; weights {:.4f} GB, state {:.4f} GB, work {:.4f} GB, loaded in {:.3f} s",
        r.rank, r.host, r.device, static_cast<double>(r.weight_bytes) / 1e9,
        static_cast<double>(r.state_bytes) / 1e9, static_cast<double>(r.work_bytes) / 1e9,
        r.load_s));
  }
}

// Rank 0, with the others serving.
std::optional<Fault> drive(Session& s, Engine& engine, std::vector<RankReport>& loads) {
  for (const std::string& w : engine.warnings()) print_line("warning: " + w);
  std::optional<Fault> fault;
  try {
    loads = engine.reports();
    if (s.log) {
      s.log->chosen(engine.config());
      s.log->model(engine.file(), engine.model());
      s.log->warnings(engine.warnings());
      s.log->ranks("loaded", loads);
    }
    record_model(s, engine, loads);
    if (s.request.job.command == BenchJob::Command::kDecode) run_decode(s, engine);
    if (s.request.job.command == BenchJob::Command::kPrefill) run_prefill(s, engine);
    if (s.log) s.log->ranks("ended", engine.reports());
    // These leave the ranks between two steps, from where they can end in order.
  } catch (const Interrupted&) {
    fault = fault_of(std::current_exception());
  } catch (const std::system_error&) {
    fault = fault_of(std::current_exception());
  } catch (const std::invalid_argument&) {
    fault = fault_of(std::current_exception());
  } catch (const NonFiniteError&) {
    fault = fault_of(std::current_exception());
  }
  engine.stop(fault ? fault->exit_code : kExitOk);
  return fault;
}

void publish(Session& s) {
  std::string text;
  for (const std::string& line : s.lines) text += line + "\n";
  text += "RESULT_JSON " + bench_json(s.record) + "\n";
  s.show.finish();
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw std::system_error(errno ? errno : EIO, std::generic_category(), "standard output");
  }
}

std::optional<Fault> finish(Session& s) {
  std::optional<Fault> fault;
  if (s.log) s.log->bench(s.record);
  try {
    publish(s);
  } catch (...) {
    fault = fault_of(std::current_exception());
  }
  if (!s.log) return fault;
  s.log->close(fault ? "failed" : "finished", fault ? "" : "all measured",
               fault ? fault->line : "");
  const std::optional<std::string> trouble = s.log->trouble();
  return trouble && !fault ? Fault{kExitEnvironment, *trouble} : fault;
}

int run_job(Session& s, const BenchJob& job, World& world, Comm& comm, const RunConfig& config) {
  const bool loads_only = job.command == BenchJob::Command::kLoad;
  const RankDevice device = make_rank_device(config, world, comm);
  std::vector<std::string> paths;
  std::vector<FileExtent> extents;
  std::vector<RankReport> loads;
  RawReport raw;
  if (loads_only) {
    together(comm, [&] { paths = part_paths(config); });
    raw.cached_before_load = settle_cache(comm, paths, job.evict);
  }
  {
    Engine engine(config, device.comm(comm), *device.backend, [&](const Progress& p) {
      if (world.rank() == 0) s.show(p);
      if (stop_asked()) throw Interrupted("stopped on request while loading");
    });
    // The plan goes with the engine, and the files must be let go before they are read again.
    if (loads_only) extents = file_extents(engine.plan(), engine.file(), world.rank());
    std::optional<Fault> fault;
    if (world.rank() == 0) {
      fault = drive(s, engine, loads);
    } else {
      engine.serve();
    }
    comm.agree(fault);
  }
  if (loads_only) run_raw(s, comm, job, config.threads, paths, extents, raw, loads);
  std::optional<Fault> fault;
  if (world.rank() == 0) fault = finish(s);
  comm.agree(fault);
  return kExitOk;
}

std::optional<RunConfig> prepare(Session& s, int argc, char** argv, World& world) {
  BenchRequest& r = s.request;
  if (!parse_bench(r, arguments(argc, argv))) return std::nullopt;
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
  Session s;
  std::optional<RunConfig> config;
  on_rank_0(comm, [&] { config = prepare(s, argc, argv, world); });
  config = share_config(comm, config);
  if (!config) return kExitOk;
  BenchJob job = s.request.job;
  comm.broadcast(Point::kRunConfig, std::as_writable_bytes(std::span(&job, 1)), 0);
  comm.set_time_limit(config->time_limit_s);
  if (config->threads == 0) config->threads = threads_per_rank(world, comm);
  stop_on_signals();
  try {
    return run_job(s, job, world, comm, *config);
  } catch (...) {
    // After finish() this changes nothing.
    const Fault fault = fault_of(std::current_exception());
    s.show.finish();
    if (s.log)
      s.log->close(fault.exit_code == kExitInterrupted ? "interrupted" : "failed", "", fault.line);
    throw;
  }
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  return k3::rank_main("k3bench", [&](k3::World& world, k3::Comm& comm) {
    return k3::run(argc, argv, world, comm);
  });
}
