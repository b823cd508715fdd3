#include "apps/figures.h"

#include <algorithm>

#include <fmt/core.h>

namespace k3 {
namespace {

// What figures must share to be compared over numbers of devices.
std::string group_of(const Slot& s) {
  return s.device() + ", " + s.model + ", " + s.quant + ", " + s.context + ", " + s.metric;
}

std::string row_of(const Ledger& l, const SlotFigure& f, const SlotFigure& base) {
  const Slot& s = f.slot;
  const double times = 1 + gain(f.value, base.value, lower_is_better(s.name()));
  const double more = s.devices() / base.slot.devices(), floor = floor_at(l, s);
  const bool first = s.node == base.slot.node;
  return fmt::format(
      "| {} | {} | {:.4g} | {} | {} | {} | {} |\n", s.engine, s.node, f.value,
      first ? "–" : fmt::format("{:.2f}", times),
      first ? "–" : fmt::format("{:.0f} %", 100 * times / more),
      floor > 0 ? fmt::format("{:.0f} %",
                              100 * (lower_is_better(s.name()) ? floor / f.value : f.value / floor))
                : "–",
      f.source);
}

}  // namespace

std::vector<SlotFigure> figures_of(const Ledger& l) {
  std::set<std::string> slots;
  for (const auto& [name, run] : l.runs) {
    if (!run.slot.empty()) slots.insert(run.slot);
  }
  std::vector<SlotFigure> out;
  for (const std::string& slot : slots) {
    if (const MeasuredRun* best = pins_of(l, slot).best)
      out.push_back({Slot::parse(slot, false), best->value, false, best->file});
  }
  for (const LockLine& line : l.lock) {
    if (line.kind == "peer")
      out.push_back({Slot::parse(line.slot, true), line.value, true, line.run + ": " + line.rest});
  }
  std::sort(out.begin(), out.end(),
            [](const SlotFigure& a, const SlotFigure& b) { return a.slot.name() < b.slot.name(); });
  return out;
}

double floor_at(const Ledger& l, const Slot& slot) {
  double best = 0;
  const bool lower = lower_is_better(slot.name());
  for (const auto& [name, run] : l.runs) {
    if (run.slot.empty() || run.floor <= 0) continue;
    if (Slot::parse(run.slot, false).place() != slot.place()) continue;
    if (best == 0 || gain(run.floor, best, lower) > 0) best = run.floor;
  }
  return best;
}

std::map<std::string, std::map<std::string, Series>> scaling_groups(const Ledger& l) {
  std::map<std::string, std::map<std::string, Series>> groups;
  for (const SlotFigure& f : figures_of(l)) groups[group_of(f.slot)][f.slot.engine].push_back(f);
  for (auto& [name, engines] : groups) {
    std::set<std::string> begun;
    // One device has no choice of what data travel over: the figure of "k3-fast" is where "k3-fast+peer" begins, too.
    for (auto& [engine, series] : engines) {
      const auto alone = engines.find(engine.substr(0, engine.find('+')));
      if (!series.front().peer && alone != engines.end() && alone->first != engine) {
        series.insert(series.begin(), alone->second.begin(), alone->second.end());
        begun.insert(alone->first);
      }
      std::stable_sort(series.begin(), series.end(), [](const SlotFigure& a, const SlotFigure& b) {
        return a.slot.devices() < b.slot.devices();
      });
    }
    for (const std::string& engine : begun) engines.erase(engine);
  }
  std::erase_if(groups, [](const auto& group) {
    const auto any = [&](const auto& says) {
      return std::any_of(group.second.begin(), group.second.end(), says);
    };
    return !any([](const auto& e) { return e.second.size() > 1; }) ||
           !any([](const auto& e) { return !e.second.front().peer; });
  });
  return groups;
}

std::string scaling_table(const Ledger& l) {
  std::string out;
  for (const auto& [name, engines] : scaling_groups(l)) {
    out += (out.empty() ? "## " : "\n## ") + name + "\n\n";
    out += "| engine | node | value | speed-up | efficiency | of the floor | from |\n";
    out += "|---|---|---:|---:|---:|---:|---|\n";
    for (const auto& [engine, series] : engines) {
      for (const SlotFigure& f : series) out += row_of(l, f, series.front());
    }
  }
  return out;
}

}  // namespace k3
