// k3plan: what a model needs and who would hold it, before anything large is moved.
#include <stdexcept>

#include <fmt/core.h>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/plan_commands.h"

namespace {

using namespace k3;

struct Command {
  const char* name;
  const char* about;
  PlanCommandFn run;
};

constexpr Command kCommands[] = {
    {"layout", "who would hold what, and how often ranks speak; without a command, too",
     plan_layout},
    {"fits", "whether a model is fully resident on a node, and how fast it could be at most",
     plan_fits},
    {"inspect", "what a model's files say and hold; a manifest of it, and what differs from one",
     plan_inspect},
    {"check-node", "what would make a job on these hosts fail, hang or crawl; start it as the job",
     plan_check_node},
};

std::string help() {
  std::string out = "usage:\n  k3plan --shape NAME | --model FILE [options]   as k3plan layout\n";
  for (const Command& c : kCommands)
    out += fmt::format("  k3plan {:<12} [options]   {}\n", c.name, c.about);
  return out +
         "\nk3plan layout --help and so on list the options of each; --version prints the build.\n"
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
  if (first == "--version") return write_out(version_text("k3plan") + "\n"), 0;
  if (first.empty() || first[0] == '-') return plan_layout(args);
  args.erase(args.begin());
  for (const Command& c : kCommands) {
    if (first == c.name) return c.run(args);
  }
  throw std::invalid_argument(fmt::format("{}: not a command; {}; k3plan --help", first, names()));
}

}  // namespace

int main(int argc, char** argv) {
  return local_main("k3plan", [&] { return run(arguments(argc, argv)); });
}
