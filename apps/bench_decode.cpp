#include "apps/bench_session.h"

#include <algorithm>

#include <fmt/core.h>

#include "rank/eval.h"

namespace k3 {
namespace {

// Leaves --depth positions in the slot; the token drawn after them.
Decision fill_decode(BenchSession& s, Engine& engine) {
  const BenchRequest& r = s.request;
  engine.reset(0);
  if (!r.fabricates()) return run_ids(s, engine, bench_ids(s, engine, r.depth));
  // The last position is a token's own, for its logits begin the text.
  if (r.depth > 1) engine.fabricate(0, r.depth - 1, engine.config().sampler.seed);
  return run_ids(s, engine, bench_ids(s, engine, 1));
}

void record_floors(BenchSession& s, const Engine& engine, double n_row, double seconds) {
  const std::optional<double> ceiling = s.request.ceiling_gb_s;
  const BenchJob& job = s.request.job;
  const bool whole = job.partial_world == 0;
  const int first = whole ? 0 : job.first_rank;
  const int n_rank = whole ? engine.plan().layout().world() : job.n_present;
  double serial = whole ? serial_bytes(engine.plan(), n_row, engine.config().cache) : 0;
  for (int rank = first; !whole && rank < first + n_rank; ++rank) {
    serial =
        std::max(serial, token_bytes(engine.plan(), rank, n_row, engine.config().cache).total());
  }
  const TokenFlops flops = token_flops(engine.plan(), first);
  s.record.number("gflop_per_token", (flops.layers + flops.head + n_row * flops.per_row) / 1e9);
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
  for (int rank = first; rank < first + n_rank; ++rank) {
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
Timed draw_tokens(BenchSession& s, Engine& engine, Decision before, std::int64_t n,
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

}  // namespace

void bench_decode(BenchSession& s, Engine& engine) {
  const BenchRequest& r = s.request;
  if (s.log && !r.fabricates()) s.log->prompt(bench_ids(s, engine, r.depth));
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
  if (!r.trace) return;
  bench_trace(s, engine, [&] {
    std::int32_t id = timed.tokens.back().id;
    for (std::int64_t i = 0; i < BenchRequest::kTraced; ++i) {
      id = engine.extend(0, std::span(&id, 1), engine.config().sampler, 0, true).id;
    }
  });
}

// ---- against the exact path -------------------------------------------------------------------------------------------

// Fills the slot and gives the ids of the warm-up and the timed part one by one, as they were drawn; rows of logits that
// chose the first `check` timed ids.
std::vector<float> replay_rows(BenchSession& s, Engine& engine) {
  const auto n_row = static_cast<std::size_t>(s.request.job.check);
  std::vector<std::int32_t> given = s.record.untimed_ids;
  const std::size_t from = given.size() - 1;  // the row after this one chose the first timed id
  given.insert(given.end(), s.record.ids.begin(), s.record.ids.end());
  fill_decode(s, engine);
  std::vector<float> rows;
  for (std::size_t i = 0; i < from + n_row; ++i) {
    stop_if_asked(engine, fmt::format("while checking, after {} of {} tokens", i, from + n_row));
    engine.logits(0, std::span(&given[i], 1), true, [&](std::span<const float> row, std::int64_t) {
      if (i >= from) rows.insert(rows.end(), row.begin(), row.end());
    });
  }
  s.n_logged = engine.timings().size();
  return rows;
}

void bench_check(BenchSession& s, Engine& exact, const std::vector<float>& rows) {
  s.n_logged = 0;
  const std::vector<float> reference = replay_rows(s, exact);
  const auto n_vocab = static_cast<std::size_t>(exact.model().n_vocab);
  const std::size_t n_row = rows.size() / n_vocab;
  std::size_t n_same = 0;
  for (std::size_t i = 0; i < n_row; ++i) {
    const auto row = rows.begin() + static_cast<std::ptrdiff_t>(i * n_vocab);
    const auto best = std::max_element(row, row + static_cast<std::ptrdiff_t>(n_vocab)) - row;
    n_same += best == s.record.ids[i];
  }
  LogitComparer comparer(exact.model().n_vocab);
  comparer.add(rows, reference);
  const LogitComparison c = comparer.result();
  s.record.number("check_n", static_cast<double>(n_row));
  s.record.number("check_replayed_equal", static_cast<double>(n_same));
  s.record.number("check_top1", c.top1);
  s.record.number("check_kld_mean", c.kld_mean);
  s.record.number("check_kld_max", c.kld_max);
  s.record.number("check_max_abs", c.max_abs);
  s.say(fmt::format(
      "check: {} of the first {} timed ids are the arg-max of an untimed replay; against the exact "
      "path top-1 {:.4f}, KLD mean {:.3g}, max {:.3g}, largest difference of a logit {:.3g}",
      n_same, n_row, c.top1, c.kld_mean, c.kld_max, c.max_abs));
}

}  // namespace k3
