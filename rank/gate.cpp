#include "rank/gate.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/core.h>

namespace k3 {
namespace {

Band before(const GateOptions& o, std::int64_t length) {
  return {std::max<std::int64_t>(0, length - o.n_before), length};
}
Band after(const GateOptions& o, std::int64_t length) { return {length, length + o.n_after}; }

std::span<const std::int32_t> part(std::span<const std::int32_t> ids, Band positions) {
  return ids.subspan(static_cast<std::size_t>(positions.begin),
                     static_cast<std::size_t>(positions.size()));
}

// Of all stages: within one, all ranks choose alike.
std::vector<ChoiceCounts> take_counts(Engine& engine) {
  std::vector<ChoiceCounts> all;
  for (const RankReport& r : engine.reports()) {
    if (engine.plan().layout().tp_rank(r.rank) == 0)
      all.insert(all.end(), r.choices.begin(), r.choices.end());
  }
  return all;
}

void add(std::vector<ChoiceCounts>& to, const std::vector<ChoiceCounts>& more) {
  if (to.empty()) {
    to = more;
  } else {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += more.at(i);
  }
}

ChoiceCounts sum_of(const std::vector<ChoiceCounts>& layers) {
  ChoiceCounts sum;
  for (const ChoiceCounts& c : layers) sum += c;
  return sum;
}

double changed_share(const ChoiceCounts& c) {
  return c.choices == 0 ? 0 : static_cast<double>(c.changed) / static_cast<double>(c.choices);
}

// The layer whose choices changed most.
ChoiceCounts worst_of(const std::vector<ChoiceCounts>& layers) {
  ChoiceCounts worst;
  for (const ChoiceCounts& c : layers) {
    if (worst.layer < 0 || changed_share(c) > changed_share(worst)) worst = c;
  }
  return worst;
}

// One length in one of the two ways; the comparison waits until the rows are there, so that threads can share it.
class GateRun {
 public:
  GateRun(Engine& engine, std::span<const std::int32_t> ids, const GateOptions& options,
          const GateReference& reference, int n_thread)
      : engine_(engine), ids_(ids), o_(options), reference_(reference), n_thread_(n_thread) {}

  std::vector<GateRow> run(std::int64_t length, bool held, LogitComparer& all_prefills) {
    engine_.use_choices(held ? ChoiceUse::kForce : ChoiceUse::kCompare);
    engine_.reset(0);
    take_counts(engine_);
    std::vector<GateRow> out;
    extend(part(ids_, {0, length}), std::min(o_.n_before, length));
    if (o_.n_before > 0) {
      all_prefills.add(rows_, reference_.rows(before(o_, length)));
      out.push_back(judge({length, held, false, {}, {}, {}}, before(o_, length)));
    }
    for (std::int64_t t = length; t < length + o_.n_after; ++t) extend(part(ids_, {t, t + 1}), 1);
    if (o_.n_after > 0) out.push_back(judge({length, held, true, {}, {}, {}}, after(o_, length)));
    engine_.use_choices(ChoiceUse::kNone);
    return out;
  }

 private:
  void extend(std::span<const std::int32_t> ids, std::int64_t n_row) {
    engine_.last_logits(0, ids, n_row, [&](std::span<const float> rows, std::int64_t) {
      rows_.insert(rows_.end(), rows.begin(), rows.end());
    });
  }

  GateRow judge(GateRow row, Band positions) {
    LogitComparer comparer(engine_.model().n_vocab, 0, n_thread_);
    comparer.add(rows_, reference_.rows(positions));
    rows_.clear();
    row.rows = comparer.result();
    row.klds.assign(comparer.klds().begin(), comparer.klds().end());
    row.choices = take_counts(engine_);
    return row;
  }

  Engine& engine_;
  std::span<const std::int32_t> ids_;
  const GateOptions& o_;
  const GateReference& reference_;
  int n_thread_;
  std::vector<float> rows_;
};

}  // namespace

void check(const GateOptions& o) {
  if (o.lengths.empty()) throw std::invalid_argument("--lengths: none");
  std::int64_t last = 0;
  for (const std::int64_t length : o.lengths) {
    if (length <= last)
      throw std::invalid_argument(
          fmt::format("--lengths: {} after {}: they must rise from 1", length, last));
    last = length;
  }
  if (o.n_before < 0) throw std::invalid_argument(fmt::format("--before {}: under 0", o.n_before));
  if (o.n_after < 1) throw std::invalid_argument(fmt::format("--after {}: under 1", o.n_after));
  if (!(o.max_kld >= 0))
    throw std::invalid_argument(fmt::format("--max-kld {}: under 0", o.max_kld));
  if (!(o.min_top1 >= 0 && o.min_top1 <= 1))
    throw std::invalid_argument(fmt::format("--min-top1 {}: outside 0 to 1", o.min_top1));
  if (!(o.max_changed >= 0 && o.max_changed <= 1))
    throw std::invalid_argument(fmt::format("--max-changed {}: outside 0 to 1", o.max_changed));
}

std::int64_t ids_needed(const GateOptions& o) { return o.lengths.back() + o.n_after; }

GateReference::GateReference(const GateOptions& options, std::int64_t n_vocab) : n_vocab_(n_vocab) {
  std::int64_t n_row = 0;
  for (const std::int64_t length : options.lengths) {
    const Band window{before(options, length).begin, after(options, length).end};
    if (!windows_.empty() && window.begin <= windows_.back().end) {
      n_row += window.end - windows_.back().end;
      windows_.back().end = window.end;
    } else {
      n_row += window.size();
      windows_.push_back(window);
    }
  }
  rows_.reserve(static_cast<std::size_t>(n_row * n_vocab));
}

std::span<const float> GateReference::rows(Band positions) const {
  std::int64_t first = 0;  // row of the window's first position
  for (const Band& w : windows_) {
    if (positions.begin >= w.begin && positions.end <= w.end) {
      return std::span(rows_).subspan(
          static_cast<std::size_t>((first + positions.begin - w.begin) * n_vocab_),
          static_cast<std::size_t>(positions.size() * n_vocab_));
    }
    first += w.size();
  }
  throw std::logic_error(
      fmt::format("no reference rows of positions {} to {}", positions.begin, positions.end - 1));
}

GateReference gate_reference(Engine& exact, std::span<const std::int32_t> ids,
                             const GateOptions& options, const GateProgress& progress) {
  GateReference reference(options, exact.model().n_vocab);
  exact.use_choices(ChoiceUse::kRecord);
  exact.reset(0);
  const auto chunk = exact.config().chunk_tok;
  for (const Band& window : reference.windows()) {
    for (Band b{exact.length(0), 0}; b.begin < window.begin; b.begin = b.end) {
      b.end = std::min(b.begin + chunk, window.begin);
      progress(fmt::format("exact path: {} of {} tokens", b.begin, ids_needed(options)));
      exact.last_logits(0, part(ids, b), 0, [](std::span<const float>, std::int64_t) {});
    }
    progress(fmt::format("exact path: {} of {} tokens", window.begin, ids_needed(options)));
    exact.logits(0, part(ids, window), false,
                 [&](std::span<const float> rows, std::int64_t) { reference.append(rows); });
  }
  exact.use_choices(ChoiceUse::kNone);
  return reference;
}

std::vector<GateRow> gate_rows(Engine& engine, std::span<const std::int32_t> ids,
                               const GateOptions& options, const GateReference& reference,
                               int n_thread, const GateProgress& progress) {
  std::vector<GateRow> out;
  for (const bool held : {true, false}) {
    LogitComparer all(engine.model().n_vocab, 0, n_thread);
    GateRun run(engine, ids, options, reference, n_thread);
    for (const std::int64_t length : options.lengths) {
      progress(fmt::format("{}: prefill of {} tokens, {} after it", held ? "held" : "free", length,
                           options.n_after));
      for (GateRow& row : run.run(length, held, all)) out.push_back(std::move(row));
    }
    if (options.n_before == 0) continue;
    GateRow& sum = out.emplace_back();
    sum.held = held;
    sum.rows = all.result();
    for (const GateRow& row : out)
      if (row.held == held && !row.decode && row.length > 0) add(sum.choices, row.choices);
  }
  return out;
}

std::vector<std::string> gate_faults(const GateRow& row, const GateOptions& o) {
  std::vector<std::string> faults;
  if (!row.held) return faults;
  // Written so that a NaN is a fault.
  if (!(row.rows.kld_mean <= o.max_kld))
    faults.push_back(
        fmt::format("mean KLD {:.4g} (expected {} at most)", row.rows.kld_mean, o.max_kld));
  const bool few = !row.decode && row.length > 0;
  if (!few && !(row.rows.top1 >= o.min_top1))
    faults.push_back(fmt::format("top-1 {:.4f} (expected {} at least)", row.rows.top1, o.min_top1));
  const ChoiceCounts worst = worst_of(row.choices);
  if (!(changed_share(worst) <= o.max_changed))
    faults.push_back(fmt::format(
        "layer {} would have chosen {:.4f} of its experts otherwise (expected {} at most)",
        worst.layer, changed_share(worst), o.max_changed));
  return faults;
}

std::vector<std::string> gate_lines(const std::vector<GateRow>& rows) {
  std::vector<std::string> lines = {
      "experts  prefill  rows           KLD mean    median       max   top-1   top-5  choices "
      "changed: "
      "all, worst layer"};
  for (const GateRow& r : rows) {
    const ChoiceCounts worst = worst_of(r.choices);
    lines.push_back(fmt::format(
        "{:<8} {:>7}  {:>5} {:<8} {:>9.2e} {:>9.2e} {:>9.2e}  {:.4f}  {:.4f}  {:.5f}, {:.5f} in {}",
        r.held ? "held" : "free", r.length > 0 ? std::to_string(r.length) : "all", r.rows.n_row,
        r.decode ? "decoded" : "inside", r.rows.kld_mean, r.rows.kld_median, r.rows.kld_max,
        r.rows.top1, r.rows.top5, changed_share(sum_of(r.choices)), changed_share(worst),
        worst.layer));
  }
  return lines;
}

BenchRecord gate_record(const std::vector<GateRow>& rows, const GateOptions& o) {
  BenchRecord record;
  record.command = "gate";
  record.number("max_kld", o.max_kld);
  record.number("min_top1", o.min_top1);
  record.number("max_changed", o.max_changed);
  BenchTable table, each, layers;
  table.name = "gate";
  each.name = "gate_rows";
  layers.name = "gate_layers";
  each.in_json = layers.in_json = false;
  for (const GateRow& r : rows) {
    const ChoiceCounts all = sum_of(r.choices), worst = worst_of(r.choices);
    table.text("experts", r.held ? "held" : "free");
    table.text("rows_of", r.decode ? "decode" : "prefill");
    table.number("length", static_cast<double>(r.length));
    table.number("rows", static_cast<double>(r.rows.n_row));
    table.number("kld_mean", r.rows.kld_mean);
    table.number("kld_median", r.rows.kld_median);
    table.number("kld_max", r.rows.kld_max);
    table.number("top1", r.rows.top1);
    table.number("top5", r.rows.top5);
    table.number("max_abs", r.rows.max_abs);
    table.number("changed", changed_share(all));
    table.number("changed_worst", changed_share(worst));
    table.number("worst_layer", worst.layer);
    table.number("faults", static_cast<double>(gate_faults(r, o).size()));
    const auto key = [&](BenchTable& t) {
      t.number("held", r.held ? 1 : 0);
      t.number("decode", r.decode ? 1 : 0);
      t.number("length", static_cast<double>(r.length));
    };
    const Band at = r.decode ? after(o, r.length) : before(o, r.length);
    for (std::size_t i = 0; i < r.klds.size(); ++i) {
      key(each);
      each.number("position", static_cast<double>(at.begin) + static_cast<double>(i));
      each.number("kld", r.klds[i]);
    }
    for (const ChoiceCounts& c : r.choices) {
      key(layers);
      layers.number("layer", c.layer);
      layers.number("choices", static_cast<double>(c.choices));
      layers.number("changed", static_cast<double>(c.changed));
      layers.number("tokens", static_cast<double>(c.tokens));
      layers.number("tokens_moved", static_cast<double>(c.tokens_moved));
    }
  }
  record.tables = {std::move(table), std::move(each), std::move(layers)};
  return record;
}

}  // namespace k3
