#include "apps/bench_session.h"

#include <algorithm>

#include <fmt/core.h>

namespace k3 {
namespace {

void fill_prefill(BenchSession& s, Engine& engine) {
  const BenchRequest& r = s.request;
  engine.reset(0);
  if (r.depth == 0) return;
  if (r.fabricates()) return engine.fabricate(0, r.depth, engine.config().sampler.seed);
  run_ids(s, engine, seeded_ids(r.depth, engine.model().n_vocab, engine.config().sampler.seed + 1));
}

void record_floor(BenchSession& s, const Engine& engine, double seconds) {
  const BenchRequest& r = s.request;
  const bool whole = r.job.partial_world == 0;
  const Layout& layout = engine.plan().layout();
  const int first = whole ? 0 : r.job.first_rank;
  const int n_rank = whole ? layout.world() : r.job.n_present;
  // Stages in turn, each as long as its slowest rank. Without ceilings only operations and bytes are known.
  const double gb_s = r.ceiling_gb_s.value_or(1), tflops = r.ceiling_tflops.value_or(1);
  double floor_s = 0, flops = 0, bytes = 0;
  for (int stage = 0; stage < layout.pp; ++stage) {
    double slowest = 0;
    for (int rank = first; rank < first + n_rank; ++rank) {
      if (layout.stage(rank) != stage) continue;
      const PrefillFloor f =
          prefill_floor(engine.plan(), rank, r.depth, r.n_tok, engine.config().chunk_tok,
                        engine.config().cache, gb_s, tflops);
      slowest = std::max(slowest, f.seconds);
      flops += f.flops;
      bytes += f.bytes;
    }
    floor_s += slowest;
  }
  s.record.number("tflop", flops / 1e12);
  s.record.number("bytes", bytes);
  s.record.number("achieved_tflops", flops / seconds / 1e12);
  s.say(fmt::format(
      "the prompt takes at least {:.3f} TFLOP and {:.3f} GB over {} rank{}: {:.2f} "
      "TFLOP/s",
      flops / 1e12, bytes / 1e9, n_rank, n_rank == 1 ? "" : "s", flops / seconds / 1e12));
  if (!r.ceiling_gb_s || !r.ceiling_tflops) return;
  s.record.number("ceiling_gb_s", gb_s);
  s.record.number("ceiling_tflops", tflops);
  s.record.number("floor_ms", 1e3 * floor_s);
  s.record.number("floor_tok_s", static_cast<double>(r.n_tok) / floor_s);
  s.record.number("floor_over_median", floor_s / seconds);
  s.say(
      fmt::format("floor {:.3f} ms, {:.0f} tok/s at {} TFLOP/s and {} GB/s: {:.1f} % of the median",
                  1e3 * floor_s, static_cast<double>(r.n_tok) / floor_s, tflops, gb_s,
                  100 * floor_s / seconds));
}

}  // namespace

void bench_prefill(BenchSession& s, Engine& engine) {
  const BenchRequest& r = s.request;
  const std::vector<std::int32_t> ids = bench_ids(s, engine, r.n_tok);
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
  record_floor(s, engine, ttft.median);
  record_prediction(s, rate.median, "tok/s");
  if (!r.trace) return;
  fill_prefill(s, engine);
  bench_trace(s, engine, [&] { run_ids(s, engine, ids); });
}

}  // namespace k3
