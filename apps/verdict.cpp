#include "apps/verdict.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <stdexcept>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/ledger.h"

namespace k3 {

const char* tier_of(double g) {
  for (const Tier& t : kTiers) {
    if (g >= t.min_gain) return t.name;
  }
  return "none";
}

namespace {

// Whether the run can be shown to be what was sealed: its receipt's hash, "none", or "broken".
std::string receipt_of(const std::string& folder, Ledger l, const std::string& run) {
  Problems problems;
  check_receipts(folder, l, problems);
  for (const nlohmann::json& r : l.receipts) {
    if (r.at("run") != run) continue;
    const std::string at = fmt::format("receipts.jsonl: line {}: ", r.at("n").get<int>() + 1);
    const bool whole = std::none_of(problems.begin(), problems.end(), [&](const std::string& p) {
      return p.find(run + ": ") != std::string::npos || p.rfind(at, 0) == 0;
    });
    return whole ? r.at("hash").get<std::string>() : "broken";
  }
  return "none";
}

// Lines of the table for the peers that measured the same thing; their gains go into `j`.
std::string against_peers(const Ledger& l, const MeasuredRun& run, nlohmann::json& j) {
  std::string out;
  const std::string place = Slot::parse(run.slot, false).place();
  for (const LockLine& line : l.lock) {
    if (line.kind != "peer") continue;
    const Slot peer = Slot::parse(line.slot, true);
    if (peer.place() != place) continue;
    const double over = gain(run.value, line.value, run.lower_is_better);
    j["gain_over_peers"][peer.engine] = over;
    out += fmt::format("peer       {:.4g}  {:+.1f} %  {} ({})\n", line.value, 100 * over,
                       peer.engine, line.run);
  }
  return out;
}

}  // namespace

std::string verdict(const std::string& path) {
  const std::filesystem::path p(path);
  const std::string folder = p.has_parent_path() ? p.parent_path().string() : ".",
                    name = p.filename().string();
  const Ledger l = read_ledger(folder);
  const auto found = l.runs.find(name);
  if (found == l.runs.end() || found->second.slot.empty())
    throw std::invalid_argument(path + ": is no log that measures what a slot holds");
  const MeasuredRun& run = found->second;
  const Gate gate = gate_of(l, run);
  const MeasuredRun* frontier = best_before(l, run.slot, run.started);
  const MeasuredRun* reference = nullptr;  // what was the newest when this one was measured
  for (const MeasuredRun* r : kept_runs(l, run.slot)) {
    if (r->started < run.started) reference = r;
  }
  const auto guard = guard_broken(l, run);
  const std::string receipt = receipt_of(folder, l, name);
  nlohmann::json j = {
      {"run", name},          {"slot", run.slot},     {"value", run.value},
      {"commit", run.commit}, {"gate", gate.words},   {"guard", guard ? *guard : "kept"},
      {"receipt", receipt},   {"significant", false}, {"tier", "none"}};
  std::string out = fmt::format("slot       {}\nvalue      {:.4g}\ngate       {}\nguard      {}\n",
                                run.slot, run.value, gate.words, j["guard"].get<std::string>());
  if (reference && frontier) {
    const double over_reference = gain(run.value, reference->value, run.lower_is_better);
    const double over_frontier = gain(run.value, frontier->value, run.lower_is_better);
    const double least = std::min(over_reference, over_frontier);
    j["gain_over_reference"] = over_reference;
    j["gain_over_frontier"] = over_frontier;
    j["significant"] = std::abs(least) >= kSignificant;
    if (gate.passed && !guard && receipt != "broken") j["tier"] = tier_of(least);
    out += fmt::format("reference  {:.4g}  {:+.1f} %  {}\nfrontier   {:.4g}  {:+.1f} %  {}\n",
                       reference->value, 100 * over_reference, reference->file, frontier->value,
                       100 * over_frontier, frontier->file);
  } else {
    out += "reference  none: the first run of its slot\n";
  }
  out += against_peers(l, run, j);
  out += "receipt    " + receipt + "\n";
  return out + "tier       " + j["tier"].get<std::string>() + "\nRESULT_JSON " + j.dump() + "\n";
}

}  // namespace k3
