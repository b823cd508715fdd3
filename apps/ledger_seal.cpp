#include <algorithm>
#include <filesystem>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

#include <fmt/core.h>

#include "apps/ledger.h"
#include "apps/sealing.h"
#include "loader/atomic_file.h"
#include "loader/h5.h"

namespace k3 {
namespace {

using nlohmann::json;

// What a program and its machine were, without the names of files and hosts.
json environment_of(const std::string& path) {
  const h5::File log = h5::File::open(path);
  json out = json::object();
  for (const char* group : {"build", "libraries"}) {
    if (!log.root().has(group)) continue;
    const h5::Group g = log.root().open_group(group);
    for (const char* name : {"version", "commit", "build_type", "flags", "compiler", "cuda_note",
                             "mpi", "hdf5", "nccl"}) {
      if (g.has_attribute(name)) out[name] = g.string_attribute(name);
    }
  }
  return out;
}

}  // namespace

std::string body_of(json receipt) {
  receipt.erase("hash");
  receipt.erase("signature");
  return receipt.dump();
}

json facts_of(const std::string& folder, const MeasuredRun& run) {
  const std::string path = folder + "/" + run.file;
  return {{"run", run.file},
          {"started", run.started},
          {"commit", run.commit},
          {"slot", run.slot},
          {"value", run.value},
          {"content_sha256", content_sha256(path)},
          {"file_sha256", file_sha256(path)},
          {"environment", environment_of(path)}};
}

namespace {

void write_whole(const std::string& path, const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

void write_lock(const std::string& folder, const Ledger& l) {
  std::vector<std::string> out;
  std::set<std::string> slots;
  for (const std::string& line : l.lock_text) {
    const std::string kind = line.substr(0, line.find(' '));
    if (kind != "baseline" && kind != "frontier" && kind != "head") out.push_back(line);
  }
  for (const LockLine& line : l.lock) {
    if (line.kind == "baseline" || line.kind == "frontier") slots.insert(line.slot);
  }
  for (const auto& [name, run] : l.runs) {
    if (!run.slot.empty()) slots.insert(run.slot);
  }
  out.push_back(
      fmt::format("head {} {}", l.receipts.size(),
                  l.receipts.empty() ? kNoHash : l.receipts.back().at("hash").get<std::string>()));
  for (const std::string& slot : slots) {
    const Pins pins = pins_of(l, slot);
    for (const auto& [kind, r] : {std::pair{"baseline", pins.newest}, {"frontier", pins.best}}) {
      out.push_back(r ? fmt::format("{} {} {} {} {}", kind, slot, r->value, r->file, r->commit)
                      : fmt::format("{} {} 0 - -", kind, slot));
    }
  }
  write_whole(folder + "/baselines.lock", out);
}

}  // namespace

std::vector<std::string> seal_runs(const std::string& folder, const std::string& key_path,
                                   const std::string& binary) {
  Ledger l = read_ledger(folder);
  const SigningKey key = SigningKey::load(key_path);
  if (l.keys.count(key.public_hex()) == 0) {
    throw std::invalid_argument(key_path + ": its public half " + key.public_hex() +
                                " is not in receipt-keys.txt");
  }
  Problems problems;
  check_receipts(folder, l, problems);
  for (const std::string& p : problems) {
    if (p.find(": has no receipt") == std::string::npos) throw std::invalid_argument(p);
  }
  const auto sealed = [&](const std::string& file) {
    return std::any_of(l.receipts.begin(), l.receipts.end(),
                       [&](const json& r) { return r.at("run") == file; });
  };
  std::vector<const MeasuredRun*> fresh;
  for (const auto& [name, run] : l.runs) {
    if (!sealed(name)) fresh.push_back(&run);
  }
  std::sort(fresh.begin(), fresh.end(), [](auto* a, auto* b) { return a->started < b->started; });
  const std::string program = std::filesystem::path(binary).filename().string();
  std::vector<std::string> done;
  for (const MeasuredRun* run : fresh) {
    json r = facts_of(folder, *run);
    r["n"] = l.receipts.size();
    r["prev"] = l.receipts.empty() ? json(kNoHash) : l.receipts.back().at("hash");
    r["binary_sha256"] =
        binary.empty() || run->program != program ? json(nullptr) : json(file_sha256(binary));
    r["key"] = key.public_hex();
    const std::string hash = sha256_hex(r.dump());
    r["hash"] = hash;
    r["signature"] = key.sign_hex(hash);
    l.receipt_text.push_back(r.dump());
    l.receipts.push_back(r);
    done.push_back(run->file);
  }
  write_whole(folder + "/receipts.jsonl", l.receipt_text);
  write_lock(folder, l);
  return done;
}

}  // namespace k3
