// k3eval: logits of given ids, how far they lie from reference logits, perplexity of a text, agreement of greedy texts.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/eval_greedy.h"
#include "apps/eval_parity.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/logit_rows.h"
#include "apps/options.h"
#include "loader/atomic_file.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/perplexity.h"
#include "rank/synth.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

constexpr const char* kHelp = R"(usage:
  k3eval logits [options]             logits of every position of a sequence, as raw floats
  k3eval compare [options]            how far logits lie from reference logits, as JSON
  k3eval ppl [options]                perplexity of a text file, as JSON
  k3eval parity [options]             whether a run computes what its reference does, by exit status
  k3eval greedy-agreement [options]   how often two greedy texts choose the same token, as JSON

k3eval logits --help and so on list the options of each; --version prints the build.
)";

constexpr const char* kLogitsAbout =
    R"(Runs token ids through a model and writes the logits of every position: little-endian 32-bit floats,
one row of the vocabulary's size after another. The file appears under its name, replacing what was
there, when it is whole; after an interruption it holds the rows of whole steps.
)";

constexpr const char* kLogitsExamples = R"(  k3eval logits --ids '1 2 3' --out x.f32
  mpirun -n 4 k3eval logits --model model.gguf --ids-file ids.txt --out x.f32 --chunk 64
)";

constexpr const char* kCompareAbout =
    R"(Compares logits with reference logits: either two files (one process, no model), or a model run here
against a file. Files hold raw little-endian 32-bit floats, rows of the vocabulary's size. Prints one
JSON object:
  rows, vocab                  what was compared
  kld_mean, _median, _max      divergence of the run from the reference, nats: sum p log(p/q), p the
                               reference
  top1                         share of rows with the same likeliest token
  top1_decided, rows_decided   the same over rows that the reference decides by more than --margin-tol
  top5                         mean share of the reference's five likeliest among the run's five
  max_abs, max_rel             largest difference of two logits; and over the row's largest logit
  kld_max_row, max_abs_row     where, from 0
)";

constexpr const char* kCompareExamples = R"(  k3eval compare --run x.f32 --ref y.f32 --vocab 163840
  mpirun -n 2 k3eval compare --model model.gguf --ids-file ids.txt --ref y.f32 --margin-tol 0.01
)";

constexpr const char* kParityAbout =
    R"(Holds a run against its reference at nested prefixes of a text: the first 4 ids, 8, 16 and so on up to
all of them (or to the reference's rows), each from an empty state, so that short and long steps are
both looked at. The reference is a file of raw logits, or the same model run once on the exact path.
The worst depth is graded: the share of its rows with the same likeliest token, and their mean
divergence from the reference, must both pass, or the exit status is 1. Prints one JSON object.
)";

constexpr const char* kParityExamples =
    R"(  k3eval parity --synthetic k3-8l --backend cuda --precision fast --ids-file ids.txt
  k3eval parity --model model.gguf --ids-file ids.txt --ref logits.f32 --max-kld 0.001
)";

constexpr const char* kPplAbout =
    R"(Perplexity of a text as llama-perplexity computes it: the text is cut into consecutive windows of
--window tokens (the rest is dropped), each evaluated from an empty state; predictions made at
positions window/2 to window-2 count. Nothing is added in front of the text. Prints one JSON object:
  ppl, error                   exp of the mean negative log likelihood, and its standard error
  mean_nll                     nats per token counted
  windows, tokens              how many were evaluated, and how many predictions counted
)";

constexpr const char* kPplExamples = R"(  k3eval ppl --file heldout.txt
  mpirun -n 4 k3eval ppl --model model.gguf --file book.txt --window 2048 --chunk 512
)";

struct Request {
  enum class Command { kLogits, kCompare, kPpl, kGreedy, kParity };
  Command command = Command::kLogits;
  RunConfig config;
  std::string ids_file, ids_text;
  std::vector<std::int32_t> ids;
  // logits
  std::string out;
  std::optional<AtomicFile> out_file;
  // compare
  std::string run, ref, positions_text;
  std::int64_t n_vocab = 0;
  double margin_tol = 0;
  std::vector<std::int32_t>
      positions;  // of the run's rows, one for each row of the reference; empty: all
  // ppl
  std::string text_file;
  std::int64_t window = 512;
  GreedyRequest greedy;
  ParityRequest parity;
  std::optional<std::string> failed_parity;
  JobNotes notes;
};

RowComparer comparer_of(const Request& r, std::int64_t n_vocab, std::int64_t n_run_row) {
  return {r.ref, n_vocab, n_run_row, r.margin_tol, r.positions};
}

void print_json(const Request& request, const LogitComparison& c) {
  nlohmann::ordered_json j;
  j["run"] = request.run.empty() ? request.config.model : request.run;
  j["ref"] = request.ref;
  j["rows"] = c.n_row;
  j["vocab"] = c.n_vocab;
  j["kld_mean"] = c.kld_mean;
  j["kld_median"] = c.kld_median;
  j["kld_max"] = c.kld_max;
  j["kld_max_row"] = c.kld_max_row;
  j["top1"] = c.top1;
  j["top1_decided"] = c.top1_decided;
  j["rows_decided"] = c.n_decided;
  j["margin_tol"] = request.margin_tol;
  j["top5"] = c.top5;
  j["max_abs"] = c.max_abs;
  j["max_rel"] = c.max_rel;
  j["max_abs_row"] = c.max_abs_row;
  // Paths may hold any bytes; a JSON string may not.
  const std::string text = j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  write_out(text);
}

constexpr const char* kAllIds = "as many as there are ids";

// ---- options --------------------------------------------------------------------------------------------------------

void add_run_options(Options& o, Request& r) {
  add_model_options(o, r.config);
  o.text("--synthetic", "SHAPE", r.config.synthetic,
         "Instead of a file: weights of this shape, made on the devices, as k3bench has them.");
  o.group("Input");
  o.text("--ids-file", "FILE", r.ids_file,
         "Token ids, separated by blanks or line ends; -: standard input.");
  o.text("--ids", "IDS", r.ids_text, "The same on the command line: --ids '1 2 3'.");
}

void add_machine_options(Options& o, Request& r, const std::string& ctx_default) {
  add_sequence_options(o, r.config, ctx_default);
  add_world_options(o, r.config);
  add_log_options(o, r.config);
}

void read_ids(Request& r, const Options& o) {
  if (o.given("--ids") == o.given("--ids-file")) {
    throw std::invalid_argument("--ids and --ids-file: give one of the two");
  }
  const bool inline_ids = o.given("--ids");
  const std::string where = inline_ids          ? "--ids"
                            : r.ids_file == "-" ? "standard input"
                                                : r.ids_file;
  r.ids = parse_ids(inline_ids ? r.ids_text : read_text(r.ids_file), where);
  const bool synthetic = o.given("--synthetic");
  if (synthetic && o.given("--model"))
    throw std::invalid_argument("--model and --synthetic: give one of the two");
  if (!synthetic && !o.given("--model")) r.config.model = default_model();
  OpenOptions open;
  open.ignore_split_count = r.config.ignore_split_count;
  const ModelFile file = synthetic ? synthetic_outline(r.config.synthetic, r.config.synthetic_seed)
                                   : ModelFile::open(r.config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  inputs.insert(inputs.end(), {r.ids_file, r.ref});
  refuse_to_replace("--out", r.out, inputs);
  refuse_to_replace("--log", r.config.log, inputs);
  std::vector<std::string> dialects;  // the engine reports them
  const ModelConfig model =
      read_model_config(file.metadata(), file.tensors(), r.config.model, dialects);
  check_ids(r.ids, model.n_vocab, where);
  r.n_vocab = model.n_vocab;
  const auto n = static_cast<std::int64_t>(r.ids.size());
  if (r.config.n_ctx == 0) r.config.n_ctx = n;
  const std::int64_t limit = std::min(r.config.n_ctx, model.n_ctx);
  if (n > limit) {
    throw std::invalid_argument(
        fmt::format("{}: {} ids, {} is {}", where, n,
                    r.config.n_ctx < model.n_ctx ? "--ctx" : "the model's limit", limit));
  }
}

// False: nothing to run (--help).
bool parse(Options& o, const std::vector<std::string>& args) {
  const Options::Outcome outcome = o.parse(args);
  if (outcome == Options::Outcome::kHelp) write_out(o.help());
  if (outcome == Options::Outcome::kVersion) write_out(full_version_text("k3eval"));
  return outcome == Options::Outcome::kRun;
}

bool prepare_logits(Request& r, const std::vector<std::string>& args) {
  Options o({"k3eval logits",
             "k3eval logits [--model FILE] (--ids-file FILE | --ids IDS) --out FILE [options]",
             kLogitsAbout, kLogitsExamples});
  add_run_options(o, r);
  o.group("Output");
  o.text("--out", "FILE", r.out, "Where the logits go.");
  add_machine_options(o, r, kAllIds);
  if (!parse(o, args)) return false;
  if (r.out.empty()) throw std::invalid_argument("--out: not given");
  read_ids(r, o);
  check(r.config);
  // Before the model is loaded: a path that cannot be written is told at once.
  r.out_file.emplace(r.out);
  return true;
}

Options compare_options(Request& r) {
  Options o({"k3eval compare",
             "k3eval compare --run FILE --ref FILE --vocab N [options]\n"
             "k3eval compare [--model FILE] (--ids-file FILE | --ids IDS) --ref FILE [options]",
             kCompareAbout, kCompareExamples});
  add_run_options(o, r);
  o.text("--run", "FILE", r.run, "Logits to compare, instead of running a model.");
  o.text("--ref", "FILE", r.ref, "Reference logits.");
  o.number("--vocab", "N", r.n_vocab, "Floats in a row; only with --run. [default: the model's]");
  o.text("--positions", "IDS", r.positions_text,
         "Positions of the run, rising from 0, that the rows of the reference belong to. [default: "
         "all]");
  o.number("--margin-tol", "X", r.margin_tol,
           "Rows whose two largest reference logits lie no further apart do not count for "
           "top1_decided.");
  add_machine_options(o, r, kAllIds);
  return o;
}

void check_compare(Request& r, const Options& o) {
  if (r.ref.empty()) throw std::invalid_argument("--ref: not given");
  if (!(r.margin_tol >= 0))
    throw std::invalid_argument(fmt::format("--margin-tol {}: under 0", r.margin_tol));
  if (o.given("--positions")) r.positions = parse_ids(r.positions_text, "--positions");
  if (r.run.empty()) {
    if (o.given("--vocab"))
      throw std::invalid_argument("--vocab: only with --run; a model knows its own");
    read_ids(r, o);
    check(r.config);
    comparer_of(r, r.n_vocab, std::ssize(r.ids));  // does the reference fit?
    return;
  }
  if (o.given("--model") || o.given("--ids") || o.given("--ids-file")) {
    throw std::invalid_argument(
        "--run: its logits are compared; --model, --ids and --ids-file do not go with it");
  }
  constexpr std::int64_t kMaxVocab = std::int64_t{1} << 30;  // a row's bytes stay far from overflow
  if (r.n_vocab < 1 || r.n_vocab > kMaxVocab) {
    throw std::invalid_argument(
        fmt::format("--vocab {}: must be given, from 1 to {}", r.n_vocab, kMaxVocab));
  }
}

bool prepare_parity(Request& r, const std::vector<std::string>& args) {
  Options o({"k3eval parity",
             "k3eval parity [--model FILE] (--ids-file FILE | --ids IDS) [--ref FILE] [options]",
             kParityAbout, kParityExamples});
  add_run_options(o, r);
  o.text("--ref", "FILE", r.ref,
         "Reference logits, one row an id. [default: the exact path of the same model, run first]");
  o.number("--min-top1", "X", r.parity.min_top1, "Least share of rows with the same token.");
  o.number("--max-kld", "X", r.parity.max_kld, "Largest mean divergence, nats.");
  add_machine_options(o, r, kAllIds);
  if (!parse(o, args)) return false;
  read_ids(r, o);
  check(r.config);
  r.parity.ref = r.ref;
  check_parity(r.parity, r.n_vocab, r.ids);
  if (!r.ref.empty()) return true;
  r.parity.other = r.config;
  r.parity.other->precision = Precision::kExact;
  return true;
}

bool prepare_ppl(Request& r, const std::vector<std::string>& args) {
  Options o(
      {"k3eval ppl", "k3eval ppl [--model FILE] --file FILE [options]", kPplAbout, kPplExamples});
  add_model_options(o, r.config);
  o.group("Input");
  o.text("--file", "FILE", r.text_file, "The text; -: standard input.");
  o.flag("--control-tokens", r.config.control_tokens,
         "Recognise control tokens in the text; else they are ordinary characters.");
  o.number("--window", "N", r.window, "Tokens in a window.");
  add_machine_options(o, r, "--window");
  if (!parse(o, args)) return false;
  if (r.text_file.empty()) throw std::invalid_argument("--file: not given");
  if (r.window < 4)
    throw std::invalid_argument(fmt::format("--window {}: must be at least 4", r.window));
  if (!o.given("--model")) r.config.model = default_model();
  if (r.config.n_ctx == 0) r.config.n_ctx = r.window;
  check(r.config);
  OpenOptions open;
  open.ignore_split_count = r.config.ignore_split_count;
  const ModelFile file = ModelFile::open(r.config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  inputs.push_back(r.text_file);
  refuse_to_replace("--log", r.config.log, inputs);
  const Tokenizer tokenizer(read_vocab(file.metadata(), r.config.model));
  r.ids =
      tokenizer.encode(read_text(r.text_file),
                       r.config.control_tokens ? ControlText::kRecognised : ControlText::kAsText);
  if (static_cast<std::int64_t>(r.ids.size()) < r.window) {
    throw std::invalid_argument(
        fmt::format("{}: {} tokens, --window needs {}", r.text_file, r.ids.size(), r.window));
  }
  return true;
}

// ---- running --------------------------------------------------------------------------------------------------------

void compare_files(const Request& r) {
  RowReader run(r.run, r.n_vocab);
  RowComparer comparer = comparer_of(r, r.n_vocab, run.n_row());
  for (std::int64_t i = 0; i < run.n_row(); ++i) comparer.add(run.next());
  print_json(r, comparer.result());
}

using RowSink = std::function<void(std::span<const float> rows, std::int64_t n_row)>;

// Rank 0: the ids through the engine, rows to `sink`, steps to the log.
void run_ids(Request& r, Engine& engine, const RowSink& sink) {
  // Between two pieces of a step the other ranks wait in the middle of it: an error of the sink is kept until the step
  // has ended and is thrown from there.
  std::exception_ptr trouble;
  std::size_t n_logged = 0;
  engine.reset(0);
  engine.logits(
      0, r.ids, false,
      [&](std::span<const float> rows, std::int64_t n_row) {
        if (trouble) return;
        try {
          sink(rows, n_row);
        } catch (...) {
          trouble = std::current_exception();
        }
      },
      [&](const Progress& p) {
        r.notes.show(p);
        for (; r.notes.log && n_logged < engine.timings().size(); ++n_logged) {
          r.notes.log->step(RunLog::Phase::kPrefill, engine.timings()[n_logged]);
        }
        if (trouble) std::rethrow_exception(trouble);
        if (stop_asked() && p.done < p.total) {
          throw Interrupted(
              fmt::format("stopped on request after {} of {} tokens", p.done, p.total));
        }
      });
}

void write_logits(Request& r, Engine& engine) {
  try {
    run_ids(r, engine, [&](std::span<const float> rows, std::int64_t) {
      r.out_file->write(std::as_bytes(rows));
    });
  } catch (const Interrupted&) {
    r.out_file->commit();
    throw;
  }
  r.out_file->commit();
}

void compare_run(Request& r, Engine& engine) {
  const std::int64_t n_vocab = engine.model().n_vocab;
  RowComparer comparer = comparer_of(r, n_vocab, std::ssize(r.ids));
  run_ids(r, engine, [&](std::span<const float> rows, std::int64_t n_row) {
    for (std::int64_t i = 0; i < n_row; ++i) {
      comparer.add(
          rows.subspan(static_cast<std::size_t>(i * n_vocab), static_cast<std::size_t>(n_vocab)));
    }
  });
  print_json(r, comparer.result());
}

void measure_ppl(Request& r, Engine& engine) {
  std::size_t n_logged = 0;
  const auto n_window = static_cast<std::int64_t>(r.ids.size()) / r.window;
  const Perplexity p = perplexity(engine, r.ids, r.window, [&](const Perplexity& so_far) {
    for (; r.notes.log && n_logged < engine.timings().size(); ++n_logged) {
      r.notes.log->step(RunLog::Phase::kPrefill, engine.timings()[n_logged]);
    }
    if (so_far.n_window % 16 == 0 || so_far.n_window == n_window) {
      print_line(fmt::format("window {} of {}: ppl {:.4f} +- {:.4f}", so_far.n_window, n_window,
                             so_far.value, so_far.error));
    }
    if (stop_asked() && so_far.n_window < n_window) {
      throw Interrupted(
          fmt::format("stopped on request after {} of {} windows", so_far.n_window, n_window));
    }
  });
  nlohmann::ordered_json j;
  j["model"] = r.config.model;
  j["file"] = r.text_file;
  j["window"] = r.window;
  j["windows"] = p.n_window;
  j["tokens"] = p.n_token;
  j["mean_nll"] = p.mean_nll;
  j["ppl"] = p.value;
  j["error"] = p.error;
  write_out(j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void run_command(Request& r, Engine& engine) {
  switch (r.command) {
    case Request::Command::kLogits:
      return write_logits(r, engine);
    case Request::Command::kCompare:
      return compare_run(r, engine);
    case Request::Command::kPpl:
      return measure_ppl(r, engine);
    case Request::Command::kGreedy:
      return greedy_of_run(r.greedy, engine, r.notes.log.get());
    case Request::Command::kParity:
      r.failed_parity = parity_of_run(r.parity, engine, r.ids, [&](std::int64_t depth) {
        if (stop_asked()) throw Interrupted(fmt::format("stopped on request at depth {}", depth));
      });
      return;
  }
}

std::optional<Fault> drive(Request& r, Engine& engine) {
  std::optional<Fault> fault = guarded(engine, [&] {
    if (r.notes.log && !r.ids.empty()) r.notes.log->prompt(r.ids);
    begin_notes(r.notes, engine);
    run_command(r, engine);
    if (r.notes.log) r.notes.log->ranks("ended", engine.reports());
  });
  if (!fault && r.failed_parity) fault = Fault{kExitInternal, *r.failed_parity};
  return close_log(r.notes, fault, fault ? "" : "all ids");
}

using Prepare = std::function<bool(Request&)>;

std::optional<RunConfig> prepare_job(Request& r, const Prepare& prepare,
                                     const std::string& command_line, const World& world) {
  if (!prepare(r)) return std::nullopt;
  const RunConfig& config = r.command == Request::Command::kGreedy ? r.greedy.config : r.config;
  if (!config.log.empty()) {
    r.notes.log =
        std::make_unique<RunLog>(config.log, run_facts("k3eval", command_line, config, world));
  }
  return config;
}

int run(const Prepare& prepare, const std::string& command_line, World& world, Comm& comm) {
  Request r;
  return run_job(
      world, comm, r.notes, [&] { return prepare_job(r, prepare, command_line, world); },
      [&](const RunConfig& config) {
        // A model that makes the reference goes first, and is gone before the other is loaded.
        const bool parity = r.command == Request::Command::kParity;
        if (std::optional<RunConfig> other =
                share_config(comm, parity ? r.parity.other : r.greedy.other)) {
          other->threads = config.threads;
          with_engine(world, comm, r.notes, *other, [&](Engine& engine) {
            return guarded(engine, [&] {
              parity ? parity_reference(r.parity, engine, r.ids)
                     : greedy_reference(r.greedy, engine);
            });
          });
        }
        with_engine(world, comm, r.notes, config, [&](Engine& engine) { return drive(r, engine); });
      });
}

// Whether the options ask for two files, which needs no ranks; malformed ones are for rank 0 to refuse.
bool wants_files_only(const std::string& command, const std::vector<std::string>& args) {
  return (command == "compare" || command == "greedy-agreement") && greedy_files_only(args);
}

bool prepare_compare(Request& r, const std::vector<std::string>& args) {
  Options o = compare_options(r);
  if (!parse(o, args)) return false;
  check_compare(r, o);
  return true;
}

int files_main(const std::string& command, const std::vector<std::string>& args) {
  Request r;
  if (command == "compare") {
    if (prepare_compare(r, args)) compare_files(r);
  } else if (prepare_greedy(r.greedy, args)) {
    greedy_of_files(r.greedy);
  }
  return kExitOk;
}

// False: there is nothing to run, a page has been printed.
bool prepare(Request& r, const std::string& command, const std::vector<std::string>& args) {
  using Command = Request::Command;
  if (command == "--help" || command == "-h") return write_out(kHelp), false;
  if (command == "--version") return write_out(full_version_text("k3eval")), false;
  if (command == "logits") return r.command = Command::kLogits, prepare_logits(r, args);
  if (command == "compare") return r.command = Command::kCompare, prepare_compare(r, args);
  if (command == "ppl") return r.command = Command::kPpl, prepare_ppl(r, args);
  if (command == "parity") return r.command = Command::kParity, prepare_parity(r, args);
  if (command == "greedy-agreement") {
    return r.command = Command::kGreedy, prepare_greedy(r.greedy, args);
  }
  const std::string known = "logits, compare, ppl, parity or greedy-agreement; k3eval --help";
  throw std::invalid_argument(command.empty() ? "a command is missing: " + known
                                              : command + ": not a command; " + known);
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  std::vector<std::string> args = k3::arguments(argc, argv);
  const bool page = k3::asks_for_page(args);
  const std::string command = args.empty() ? "" : args[0];
  if (!args.empty()) args.erase(args.begin());
  if (page) {
    return k3::page_main("k3eval", [&] {
      k3::Request r;
      k3::prepare(r, command, args);
    });
  }
  if (k3::wants_files_only(command, args)) {
    return k3::local_main("k3eval", [&] { return k3::files_main(command, args); });
  }
  return k3::rank_main("k3eval", [&](k3::World& world, k3::Comm& comm) {
    return k3::run([&](k3::Request& r) { return k3::prepare(r, command, args); },
                   k3::shell_quoted(argc, argv), world, comm);
  });
}
