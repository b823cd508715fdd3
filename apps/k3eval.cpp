// k3eval: how well a model does, and whether a run computes what it should.
#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "apps/eval_command.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "rank/fault.h"

namespace k3 {
namespace {

struct Entry {
  const char* name;
  const char* about;
  MakeEval make;
  bool files;  // with --run it compares two files: one process, no model
};

constexpr Entry kCommands[] = {
    {"logits", "logits of every position of a sequence, as raw floats", make_eval_logits, false},
    {"compare", "how far logits lie from reference logits, as JSON", make_eval_compare, true},
    {"ppl", "perplexity of a text file, as JSON", make_eval_ppl, false},
    {"parity", "whether a run computes what its reference does, by exit status", make_eval_parity,
     false},
    {"gate", "a run against the exact path at given depths, graded, by exit status", make_eval_gate,
     false},
    {"greedy-agreement", "how often two greedy texts choose the same token, as JSON",
     make_eval_greedy, true},
};

std::string help() {
  std::string out = "usage:\n";
  for (const Entry& e : kCommands)
    out += fmt::format("  k3eval {:<28}{}\n", std::string(e.name) + " [options]", e.about);
  return out +
         "\nk3eval logits --help and so on list the options of each; --version prints the build.\n";
}

const Entry* find(const std::string& name) {
  for (const Entry& e : kCommands) {
    if (name == e.name) return &e;
  }
  return nullptr;
}

[[noreturn]] void refuse(const std::string& command) {
  std::string known;
  for (const Entry& e : kCommands) known += (known.empty() ? "" : ", ") + std::string(e.name);
  known += "; k3eval --help";
  throw std::invalid_argument(command.empty() ? "a command is missing: " + known
                                              : command + ": not a command; " + known);
}

// Null: there is nothing to run, a page has been printed.
std::unique_ptr<EvalCommand> prepare(const std::string& name,
                                     const std::vector<std::string>& args) {
  if (name == "--help" || name == "-h") return write_out(help()), nullptr;
  if (name == "--version") return write_out(full_version_text("k3eval")), nullptr;
  const Entry* entry = find(name);
  if (!entry) refuse(name);
  std::unique_ptr<EvalCommand> command = entry->make();
  if (!command->prepare(args)) return nullptr;
  return command;
}

std::optional<Fault> drive(EvalCommand& command, Engine& engine, JobNotes& notes) {
  std::optional<Fault> fault = guarded(engine, [&] {
    const std::vector<std::int32_t> prompt = command.prompt();
    if (notes.log && !prompt.empty()) notes.log->prompt(prompt);
    begin_notes(notes, engine);
    command.run(engine, notes);
    if (notes.log) notes.log->ranks("ended", engine.reports());
  });
  if (!fault && command.failed()) fault = Fault{kExitInternal, *command.failed()};
  return close_log(notes, fault, fault ? "" : "all ids");
}

using Prepare = std::function<std::unique_ptr<EvalCommand>()>;

int run(const Prepare& prepare, const std::string& command_line, World& world, Comm& comm) {
  JobNotes notes;
  std::unique_ptr<EvalCommand> command;  // rank 0's
  ChoiceBook book;                       // of every rank, for both engines
  const auto lend_book = [&](Engine& engine) { engine.keep_choices(book); };
  return run_job(
      world, comm, notes,
      [&]() -> std::optional<RunConfig> {
        command = prepare();
        if (!command) return std::nullopt;
        const RunConfig& config = command->config();
        if (!config.log.empty()) {
          notes.log = std::make_unique<RunLog>(config.log,
                                               run_facts("k3eval", command_line, config, world));
        }
        return config;
      },
      [&](const RunConfig& config) {
        if (std::optional<RunConfig> other =
                share_config(comm, command ? command->other() : std::nullopt)) {
          other->threads = config.threads;
          with_engine(
              world, comm, notes, *other,
              [&](Engine& engine) {
                return guarded(engine, [&] { command->make_reference(engine); });
              },
              lend_book);
        }
        with_engine(
            world, comm, notes, config,
            [&](Engine& engine) { return drive(*command, engine, notes); }, lend_book);
      });
}

// Whether the options ask for two files, which needs no ranks; malformed ones are for rank 0 to refuse.
bool wants_files_only(const std::string& name, const std::vector<std::string>& args) {
  const Entry* entry = find(name);
  return entry && entry->files && std::any_of(args.begin(), args.end(), [](const std::string& a) {
           return a == "--run" || a.starts_with("--run=");
         });
}

int files_main(const std::string& name, const std::vector<std::string>& args) {
  if (const auto command = prepare(name, args)) command->run_files();
  return kExitOk;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  std::vector<std::string> args = k3::arguments(argc, argv);
  const bool page = k3::asks_for_page(args);
  const std::string command = args.empty() ? "" : args[0];
  if (!args.empty()) args.erase(args.begin());
  if (page) return k3::page_main("k3eval", [&] { k3::prepare(command, args); });
  if (k3::wants_files_only(command, args)) {
    return k3::local_main("k3eval", [&] { return k3::files_main(command, args); });
  }
  return k3::rank_main("k3eval", [&](k3::World& world, k3::Comm& comm) {
    return k3::run([&] { return k3::prepare(command, args); }, k3::shell_quoted(argc, argv), world,
                   comm);
  });
}
