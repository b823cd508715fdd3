#include "apps/ledger.h"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/sealing.h"

namespace k3 {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> out;
  if (!fs::exists(path)) return out;
  std::istringstream in(file_text(path));
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

LockLine parse_lock_line(const std::string& line) {
  std::istringstream in(line);
  LockLine l;
  in >> l.kind >> l.slot;
  if (l.kind == "baseline" || l.kind == "frontier")
    in >> l.value >> l.run >> l.commit;
  else if (l.kind == "head" || l.kind == "guard")
    in >> l.run;
  else if (l.kind == "peer")
    in >> l.value >> l.run, std::getline(in >> std::ws, l.rest);
  else
    throw std::invalid_argument("baselines.lock: '" + line +
                                "': expected baseline, frontier, guard, peer or head");
  if (!in && l.rest.empty())
    throw std::invalid_argument("baselines.lock: '" + line + "': a word or number is missing");
  return l;
}

std::vector<LockLine> parse_lock(const std::vector<std::string>& text) {
  std::vector<LockLine> out;
  for (const std::string& line : text) {
    if (!line.empty() && line[0] != '#') out.push_back(parse_lock_line(line));
  }
  return out;
}

}  // namespace

std::vector<LockLine> read_lock(const std::string& path) { return parse_lock(lines_of(path)); }

Ledger read_ledger(const std::string& folder) {
  Ledger l;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".h5") continue;
    const std::string name = entry.path().filename().string();
    l.runs.emplace(name, read_measured(folder, name));
  }
  if (fs::exists(folder + "/ladder.json")) {
    const json words = json::parse(file_text(folder + "/ladder.json"));
    for (const json& row : words.at("rows")) {
      if (row.at("kept").get<std::string>() == "no")
        l.failed.insert(row.at("log").get<std::string>());
    }
  }
  l.receipt_text = lines_of(folder + "/receipts.jsonl");
  for (const std::string& line : lines_of(folder + "/receipt-keys.txt")) {
    if (!line.empty() && line[0] != '#') l.keys.insert(line.substr(0, 64));
  }
  l.lock_text = lines_of(folder + "/baselines.lock");
  l.lock = parse_lock(l.lock_text);
  return l;
}

Gate gate_of(const Ledger& l, const MeasuredRun& r) {
  const auto failed = [](const std::string& why) { return Gate{false, true, "failed: " + why}; };
  if (!r.faults.empty()) return failed(r.faults.front());
  if (r.checked) {
    if (r.replayed < r.compared)
      return failed(
          fmt::format("{:g} of {:g} ids are those of an untimed replay", r.replayed, r.compared));
    if (r.top1 < kMinTop1 || r.kld > kMaxKld)
      return failed(
          fmt::format("top-1 {:.3f} and KLD {:.2g} against the exact path", r.top1, r.kld));
    return {true, false, "passed"};
  }
  // The exact path is the one that the others are held to; parity of its own is a matter of tests.
  if (r.exact) return {true, false, "exact path"};
  Gate out{false, false, "not checked"};
  for (const auto& [name, g] : l.runs) {
    if (!g.grades || g.commit != r.commit || g.model != r.model || g.precision != r.precision)
      continue;
    if (!g.grade_passed) return failed("k3eval gate, " + name);
    // A grade that asked for less than ours says nothing.
    if (g.grade_max_kld <= kMaxKld && g.grade_min_top1 >= kMinTop1)
      out = {true, false, "passed: k3eval gate, " + name};
  }
  return out;
}

std::vector<const MeasuredRun*> kept_runs(const Ledger& l, const std::string& slot) {
  std::vector<const MeasuredRun*> out;
  for (const auto& [name, run] : l.runs) {
    if (run.slot == slot && l.failed.count(name) == 0 && !gate_of(l, run).failed)
      out.push_back(&run);
  }
  std::sort(out.begin(), out.end(), [](auto* a, auto* b) { return a->started < b->started; });
  return out;
}

const MeasuredRun* best_before(const Ledger& l, const std::string& slot,
                               const std::string& started) {
  const MeasuredRun* best = nullptr;
  for (const MeasuredRun* r : kept_runs(l, slot)) {
    if (r->started < started && (!best || gain(r->value, best->value, r->lower_is_better) > 0))
      best = r;
  }
  return best;
}

std::optional<std::string> guard_broken(const Ledger& l, const MeasuredRun& run) {
  for (const LockLine& g : l.lock) {
    if (g.kind != "guard" || g.slot != run.slot) continue;
    const MeasuredRun* best = best_before(l, g.run, run.started);
    if (!best) continue;
    const MeasuredRun* same = nullptr;
    for (const MeasuredRun* r : kept_runs(l, g.run)) {
      if (r->commit == run.commit) same = r;
    }
    if (!same) return "guard: " + g.run + " was not measured at commit " + run.commit;
    const double cost = -gain(same->value, best->value, same->lower_is_better);
    if (cost > kGuardCost)
      return fmt::format("guard: {} costs {:.1f} % at commit {}", g.run, 100 * cost, run.commit);
  }
  return std::nullopt;
}

Pins pins_of(const Ledger& l, const std::string& slot) {
  Pins p;
  for (const MeasuredRun* r : kept_runs(l, slot)) {
    if (guard_broken(l, *r)) continue;
    p.newest = r;
    if (!p.best || gain(r->value, p.best->value, r->lower_is_better) > 0) p.best = r;
  }
  return p;
}

}  // namespace k3
