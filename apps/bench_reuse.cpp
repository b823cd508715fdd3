// k3bench prefill --reuse: prompts that begin alike, with the beginning read once.
#include <algorithm>
#include <cmath>

#include <fmt/core.h>

#include "apps/bench_session.h"

namespace k3 {
namespace {

// One way to come to the prefix's state, timed with the prompt that follows.
struct Way {
  const char* name;
  const char* text;
  std::function<void()> begin;
  std::vector<double> ttft_s;
  std::vector<float> logits;
};

std::vector<float> last_row(Engine& engine, std::span<const std::int32_t> ids) {
  std::vector<float> row;
  engine.last_logits(
      0, ids, 1, [&](std::span<const float> r, std::int64_t) { row.assign(r.begin(), r.end()); });
  return row;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b.at(i))));
  return worst;
}

void time_way(BenchSession& s, Engine& engine, std::span<const std::int32_t> ids, Way& way) {
  const BenchRequest& r = s.request;
  for (std::int64_t i = 0; i < r.warmup + r.repeat; ++i) {
    stop_if_asked(engine,
                  fmt::format("after {} of {} times, {}", i, r.warmup + r.repeat, way.name));
    const double begin = outside_clock_s();
    way.begin();
    const Decision d = run_ids(s, engine, ids);
    const double ttft = outside_clock_s() - begin;
    log_steps(s, engine, RunLog::Phase::kPrefill);
    if (i < r.warmup) continue;
    way.ttft_s.push_back(ttft);
    s.record.ids.push_back(d.id);
  }
  way.begin();
  way.logits = last_row(engine, ids);
}

// What is kept of the prefix, and what that takes.
std::uint64_t keep_prefix(BenchSession& s, Engine& engine, std::span<const std::int32_t> prefix) {
  engine.reset(0);
  run_ids(s, engine, prefix);
  engine.fork(0, 1);
  const double begin = outside_clock_s();
  const std::uint64_t kept = engine.save(0);
  s.record.number("save_ms", 1e3 * (outside_clock_s() - begin));
  return kept;
}

}  // namespace

void bench_reuse(BenchSession& s, Engine& engine) {
  const BenchRequest& r = s.request;
  const std::vector<std::int32_t> ids = bench_ids(s, engine, r.n_tok);
  const std::vector<std::int32_t> prefix =
      seeded_ids(r.depth, engine.model().n_vocab, engine.config().sampler.seed + 1);
  if (s.log) s.log->prompt(ids);
  std::uint64_t kept = 0;
  Way ways[] = {
      {"whole",
       "prefix and prompt read",
       [&] {
         engine.reset(0);
         run_ids(s, engine, prefix);
       },
       {},
       {}},
      {"fork", "prefix forked from another slot, prompt read", [&] { engine.fork(1, 0); }, {}, {}},
      {"restore",
       "prefix copied from host memory, prompt read",
       [&] { engine.restore(kept, 0); },
       {},
       {}},
  };
  BenchTable table;
  table.name = "reuse";
  s.record.text("state", fill_text(r));
  s.record.number("tokens", static_cast<double>(r.n_tok));
  s.record.number("depth", static_cast<double>(r.depth));
  s.record.number("chunk", static_cast<double>(engine.config().chunk_tok));
  kept = keep_prefix(s, engine, prefix);
  for (Way& way : ways) {
    time_way(s, engine, ids, way);
    const Spread ttft = spread_of(way.ttft_s);
    const double apart = largest_difference(way.logits, ways[0].logits);
    table.text("way", way.name);
    table.number("median_ttft_ms", 1e3 * ttft.median);
    table.number("p10_ttft_ms", 1e3 * ttft.p10);
    table.number("p90_ttft_ms", 1e3 * ttft.p90);
    table.number("max_abs_logit", apart);
    s.say(fmt::format("{:<45} TTFT {:.3f} ms (p10 {:.3f}, p90 {:.3f}), logits {}", way.text,
                      1e3 * ttft.median, 1e3 * ttft.p10, 1e3 * ttft.p90,
                      &way == ways ? "the reference"
                      : apart == 0 ? "equal"
                                   : fmt::format("DIFFERENT by up to {:.3g}", apart)));
  }
  s.record.tables.push_back(std::move(table));
}

}  // namespace k3
