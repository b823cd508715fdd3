#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/ledger.h"
#include "apps/sealing.h"

namespace k3 {
namespace {

using nlohmann::json;

void check_facts(const std::string& folder, const Ledger& l, const json& r, const std::string& at,
                 Problems& out) {
  const auto name = r.at("run").get<std::string>();
  const auto run = l.runs.find(name);
  if (run == l.runs.end()) {
    out.push_back(at + name + ": the sealed file is not there");
    return;
  }
  const json found = facts_of(folder, run->second);
  for (const auto& [key, value] : found.items()) {
    if (!r.contains(key) || r.at(key) != value)
      out.push_back(at + name + ": " + key + " is not what was sealed");
  }
}

}  // namespace

void check_receipts(const std::string& folder, Ledger& l, Problems& out) {
  std::string prev = kNoHash;
  std::set<std::string> sealed;
  for (std::size_t i = 0; i < l.receipt_text.size(); ++i) {
    const std::string at = fmt::format("receipts.jsonl: line {}: ", i + 1);
    const json r = json::parse(l.receipt_text[i], nullptr, false);
    if (!r.is_object() || r.dump() != l.receipt_text[i]) {
      out.push_back(at + "is not written as it was sealed");
      continue;
    }
    try {
      const auto hash = r.at("hash").get<std::string>();
      if (sha256_hex(body_of(r)) != hash) out.push_back(at + "its hash is another");
      if (r.at("prev") != prev || r.at("n") != i)
        out.push_back(at + "does not follow the receipt before it");
      const auto key = r.at("key").get<std::string>();
      if (l.keys.count(key) == 0) out.push_back(at + "its key is not in receipt-keys.txt");
      if (!signed_by(key, hash, r.at("signature").get<std::string>()))
        out.push_back(at + "the signature is not of this text");
      if (!sealed.insert(r.at("run").get<std::string>()).second)
        out.push_back(at + "its run is sealed twice");
      check_facts(folder, l, r, at, out);
      prev = hash;
      l.receipts.push_back(r);
    } catch (const json::exception& e) {
      out.push_back(at + "lacks a field: " + e.what());
    }
  }
  for (const auto& [name, run] : l.runs) {
    if (sealed.count(name) == 0) out.push_back(name + ": has no receipt: k3report seal --key FILE");
    for (const std::string& fault : run.faults)
      out.push_back(name + ": less work than claimed: " + fault);
  }
}

namespace {

void check_ours(const Ledger& l, const LockLine& line, Problems& out) {
  const std::string at = "baselines.lock: " + line.kind + " " + line.slot + ": ";
  const Pins pins = pins_of(l, line.slot);
  if (line.value == 0) {
    if (pins.best) out.push_back(at + "0 says not measured, " + pins.best->file + " measured it");
    return;
  }
  const auto run = l.runs.find(line.run);
  if (run == l.runs.end()) {
    out.push_back(at + "no committed run " + line.run + " produced " +
                  fmt::format("{}", line.value));
    return;
  }
  const MeasuredRun& r = run->second;
  if (r.slot != line.slot) out.push_back(at + line.run + " measured another axis: " + r.slot);
  if (r.value != line.value)
    out.push_back(at + fmt::format("{} is typed, {} measured {}", line.value, line.run, r.value));
  if (r.commit != line.commit) out.push_back(at + line.run + " is of commit " + r.commit);
  const bool sealed = std::any_of(l.receipts.begin(), l.receipts.end(), [&](const json& j) {
    return j.at("run") == line.run && j.at("slot") == line.slot && j.at("value") == line.value;
  });
  if (!sealed) out.push_back(at + "traces to no receipt");
  if (const auto broken = guard_broken(l, r)) out.push_back(at + *broken);
  if (line.kind == "frontier" && pins.best &&
      gain(pins.best->value, line.value, lower_is_better(line.slot)) > 0) {
    out.push_back(at + fmt::format("lowered: {} reached {} at commit {}", pins.best->file,
                                   pins.best->value, pins.best->commit));
  }
  const auto all = kept_runs(l, line.slot);
  if (line.kind == "baseline" && !all.empty() &&
      std::abs(gain(all.back()->value, line.value, r.lower_is_better)) > kStale) {
    out.push_back(at + fmt::format("stale: {} at commit {} measured {}, more than 10 % off {}",
                                   all.back()->file, all.back()->commit, all.back()->value,
                                   line.value));
  }
}

void check_lock_line(const Ledger& l, const LockLine& line, Problems& out) {
  const std::string at = "baselines.lock: " + line.kind + " ";
  try {
    if (line.kind == "head") return;
    Slot::parse(line.slot, line.kind == "peer");
    if (line.kind == "guard") {
      Slot::parse(line.run, false);
      return;
    }
  } catch (const std::invalid_argument& e) {
    out.push_back(at + e.what());
    return;
  }
  if (line.kind != "peer") return check_ours(l, line, out);
  if (line.run != "published" && line.run != "measured-elsewhere") {
    out.push_back(at + line.slot + ": '" + line.run +
                  "': expected published or measured-elsewhere");
  }
  if (line.rest.size() < 12)
    out.push_back(at + line.slot + ": says not where its figure comes from");
}

void check_lock(const Ledger& l, Problems& out) {
  std::map<std::string, int> seen;
  std::size_t n_head = 0;
  for (const LockLine& line : l.lock) {
    check_lock_line(l, line, out);
    if (line.kind != "guard" && line.kind != "head" && ++seen[line.kind + line.slot] > 1) {
      out.push_back("baselines.lock: " + line.kind + " " + line.slot + ": twice");
    }
    if (line.kind != "head") continue;
    ++n_head;
    const std::size_t n = std::stoul(line.slot);
    if (n > l.receipts.size() || (n > 0 && l.receipts[n - 1].at("hash") != line.run)) {
      out.push_back("baselines.lock: head " + line.slot +
                    ": the receipts do not lead to it: some were cut off");
    }
  }
  if (n_head != 1) out.push_back("baselines.lock: has no head, or several");
  for (const auto& [name, run] : l.runs) {
    if (run.slot.empty() || !pins_of(l, run.slot).best) continue;
    for (const char* kind : {"baseline", "frontier"}) {
      if (seen[kind + run.slot]++ == 0)
        out.push_back(std::string("baselines.lock: lacks ") + kind + " " + run.slot);
    }
  }
}

void check_before(const Ledger& l, const std::string& path, Problems& out) {
  for (const LockLine& old : read_lock(path)) {
    if (old.kind != "frontier" || old.value == 0) continue;
    const auto now = std::find_if(l.lock.begin(), l.lock.end(), [&](const LockLine& n) {
      return n.kind == "frontier" && n.slot == old.slot;
    });
    if (now == l.lock.end() || now->value == 0 ||
        gain(now->value, old.value, lower_is_better(old.slot)) < 0) {
      out.push_back("baselines.lock: frontier " + old.slot + ": lower than in " + path);
    }
  }
}

}  // namespace

std::vector<std::string> check_ledger(const std::string& folder, const std::string& before) {
  Ledger l = read_ledger(folder);
  Problems out;
  check_receipts(folder, l, out);
  check_lock(l, out);
  if (!before.empty()) check_before(l, before, out);
  return out;
}

}  // namespace k3
