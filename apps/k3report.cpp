// k3report: what the measured runs under results/ say, and whether it can be trusted.
#include <stdexcept>

#include <fmt/core.h>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/report_commands.h"

namespace {

using namespace k3;

struct Command {
  const char* name;
  const char* about;
  ReportCommandFn run;
};

constexpr Command kCommands[] = {
    {"ladder", "the page of measured runs, from their logs", report_ladder},
    {"verdict", "one run against the others: gate, significance, tier", report_verdict},
    {"scaling", "tables over numbers of devices, with efficiency", report_scaling},
    {"plot", "pictures of all of it, as SVG", report_plot},
    {"verify", "whether receipts, logs and baselines hold", report_verify},
    {"seal", "receipts of new logs, and the slots pinned anew", report_seal},
    {"keygen", "a key that seals", report_keygen},
};

std::string help() {
  std::string out = "usage:\n";
  for (const Command& c : kCommands)
    out += fmt::format("  k3report {:<10} [options]   {}\n", c.name, c.about);
  return out +
         "\nk3report ladder --help and so on list the options of each; --version prints the "
         "build.\n"
         "\nExit codes:\n" +
         Manual::kExitCodes;
}

std::string names() {
  std::string out;
  for (const Command& c : kCommands) out += (out.empty() ? "" : ", ") + std::string(c.name);
  return out;
}

int run(std::vector<std::string> args) {
  const std::string first = args.empty() ? "" : args[0];
  if (first == "--help" || first == "-h") return write_out(help()), 0;
  if (first == "--version") return write_out(version_text("k3report") + "\n"), 0;
  for (const Command& c : kCommands) {
    if (first == c.name) return c.run({args.begin() + 1, args.end()});
  }
  throw std::invalid_argument(
      (first.empty() ? "a command is missing: " : first + ": not a command; ") + names() +
      "; k3report --help");
}

}  // namespace

int main(int argc, char** argv) {
  return local_main("k3report", [&] { return run(arguments(argc, argv)); });
}
