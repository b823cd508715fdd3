// The receipts and the baselines of results/: what may be claimed, and by which run. All of it is text and can be checked
// without the history of the repository. Rules and use: results/README.md.
//
// receipts.jsonl: one JSON object a line, each naming the hash of the one before. receipt-keys.txt: public halves, one a line.
// baselines.lock: lines of
//   head N HASH                       the newest receipt when the lock was written
//   baseline SLOT VALUE RUN COMMIT    the newest kept run of the slot; 0 - - where nothing was measured
//   frontier SLOT VALUE RUN COMMIT    the best one
//   guard SLOT GUARDED                a run pinned in SLOT shows that its commit costs GUARDED 1 % at most
//   peer SLOT VALUE KIND SOURCE ...   another engine's figure; KIND: published or measured-elsewhere
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "apps/measured_run.h"
#include "apps/slot.h"

namespace k3 {

// Shares of a value. The gate's two limits are those the peers' receipts are held to.
inline constexpr double kStale = 0.10;
inline constexpr double kGuardCost = 0.01;
inline constexpr double kMinTop1 = 0.95;
inline constexpr double kMaxKld = 0.05;

inline const std::string kNoHash(64, '0');  // before the first receipt

struct LockLine {
  std::string kind, slot, run, commit,
      rest;  // of a peer, run is KIND and rest SOURCE; of a guard, run is GUARDED
  double value = 0;
};

struct Ledger {
  std::map<std::string, MeasuredRun> runs;  // by file name
  std::set<std::string> failed;             // runs of steps that were not kept (ladder.json)
  std::vector<std::string> receipt_text;    // the receipts' lines
  std::vector<nlohmann::json> receipts;     // those that check_receipts() found whole
  std::set<std::string> keys;
  std::vector<std::string> lock_text;
  std::vector<LockLine> lock;
};

// Reads all of it, checks nothing but the form of the lock. Throws std::invalid_argument naming the file and what is wrong.
Ledger read_ledger(const std::string& folder);
std::vector<LockLine> read_lock(const std::string& path);

// Whether a run computed what it should: its own contradictions first; then its check against the exact path; where it has
// none, the logs of k3eval gate of the same commit, model and precision, all of which must have passed.
struct Gate {
  bool passed = false;
  bool failed = false;  // neither: it was not checked
  std::string words;
};
Gate gate_of(const Ledger& l, const MeasuredRun& run);

// Runs of a slot that may be pinned, oldest first: kept, whole, and not failing the gate.
std::vector<const MeasuredRun*> kept_runs(const Ledger& l, const std::string& slot);
// The best of them that started before; null where there is none.
const MeasuredRun* best_before(const Ledger& l, const std::string& slot,
                               const std::string& started);
// Why `run` may not be pinned for the sake of a guarded slot, or nothing.
std::optional<std::string> guard_broken(const Ledger& l, const MeasuredRun& run);

// What a lock should say of a slot; null where nothing was measured.
struct Pins {
  const MeasuredRun* newest = nullptr;
  const MeasuredRun* best = nullptr;
};
Pins pins_of(const Ledger& l, const std::string& slot);

// A receipt of `run` before it is chained and signed, and the text whose hash is signed.
nlohmann::json facts_of(const std::string& folder, const MeasuredRun& run);
std::string body_of(nlohmann::json receipt);

// One line for each thing that is wrong.
using Problems = std::vector<std::string>;
// Fills l.receipts with the whole ones.
void check_receipts(const std::string& folder, Ledger& l, Problems& out);
// Receipts and lock; empty where all holds. `before`: an older lock that no frontier may be below, or empty.
Problems check_ledger(const std::string& folder, const std::string& before);

// Seals the logs of `folder` that have no receipt, then writes the lock anew. `binary`: the program that measured, whose
// hash goes into the receipts of the logs that name it; empty where it is not at hand. Returns what was sealed. Throws
// std::invalid_argument where the ledger is broken.
std::vector<std::string> seal_runs(const std::string& folder, const std::string& key,
                                   const std::string& binary);

}  // namespace k3
