// k3report keygen, seal, verify and verdict: receipts and baselines. What they do: apps/ledger.h.
#include <stdexcept>

#include "apps/ledger.h"
#include "apps/local_main.h"
#include "apps/report_commands.h"
#include "apps/sealing.h"
#include "apps/verdict.h"

namespace k3 {
namespace {

int verify(const std::string& folder, const std::string& before) {
  const Problems problems = check_ledger(folder, before);
  for (const std::string& p : problems) print_line("k3report: " + p);
  if (problems.empty()) write_out("receipts and baselines hold\n");
  return problems.empty() ? 0 : 2;
}

void need_key(const std::string& key, const std::string& command) {
  if (key.empty())
    throw std::invalid_argument("--key: k3report " + command + " needs the key's file");
}

}  // namespace

int report_keygen(const std::vector<std::string>& args) {
  std::string path;
  Options options(
      {"k3report keygen", "k3report keygen --key FILE",
       "Makes an Ed25519 key and prints its public half, a line of receipt-keys.txt. The "
       "file is yours:\n"
       "readable by you alone, never in the repository, never written over.\n",
       "  k3report keygen --key ~/k3-receipts.pem >>results/receipt-keys.txt\n"});
  options.group("Key");
  options.text("--key", "FILE", path, "Where to write it.");
  if (!parsed(options, args)) return 0;
  need_key(path, "keygen");
  const SigningKey key = SigningKey::generate();
  key.save(path);
  write_out(key.public_hex() + "\n");
  return 0;
}

int report_seal(const std::vector<std::string>& args) {
  ReportRequest q;
  std::string key, binary;
  Options options(
      {"k3report seal", "k3report seal --key FILE [--binary FILE] [--results DIR]",
       "Seals every log that has no receipt, pins the slots anew and checks all of it. A "
       "broken ledger is\n"
       "left as it is.\n",
       "  k3report seal --key ~/k3-receipts.pem --binary build/cuda/bin/k3bench\n"});
  add_report_options(options, q, false);
  options.text("--key", "FILE", key, "Your key; its public half is in receipt-keys.txt.");
  options.text(
      "--binary", "FILE", binary,
      "The program that measured: its hash goes into the receipts of the logs that name it."
      " [default: null is sealed]");
  if (!parsed(options, args)) return 0;
  need_key(key, "seal");
  for (const std::string& run : seal_runs(q.folder, key, binary)) write_out("sealed " + run + "\n");
  return verify(q.folder, "");
}

int report_verify(const std::vector<std::string>& args) {
  ReportRequest q;
  std::string before;
  Options options({"k3report verify", "k3report verify [--results DIR] [--before FILE]",
                   "Says what is wrong with receipts, logs and baselines, one line each, and ends "
                   "with 2 if anything is.\n",
                   "  k3report verify --results results\n"});
  add_report_options(options, q, false);
  options.text("--before", "FILE", before, "An older lock that no frontier may be below.");
  if (!parsed(options, args)) return 0;
  return verify(q.folder, before);
}

int report_verdict(const std::vector<std::string>& args) {
  std::vector<std::string> run;
  Options options(
      {"k3report verdict", "k3report verdict RUN.h5",
       "Judges a run against the others in its folder: gate, gain over the run before and "
       "over the best before,\n"
       "tier of the smaller gain. Ends with one line RESULT_JSON.\n",
       "  k3report verdict results/h200-k3-8l-decode-128-rings.h5\n"});
  options.words("RUN", run, 1);
  if (!parsed(options, args)) return 0;
  if (run.empty())
    throw std::invalid_argument("verdict: a log is missing; k3report verdict --help");
  write_out(verdict(run[0]));
  return 0;
}

}  // namespace k3
