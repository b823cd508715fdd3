// k3eval: logits of given ids, how far they lie from reference logits, perplexity of a text.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/device.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/progress.h"
#include "loader/parts.h"
#include "rank/eval.h"
#include "rank/fault.h"
#include "rank/perplexity.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

constexpr const char* kHelp = R"(usage:
  k3eval logits [options]    logits of every position of a sequence, as raw floats
  k3eval compare [options]   how far logits lie from reference logits, as JSON
  k3eval ppl [options]       perplexity of a text file, as JSON

k3eval logits --help and so on list the options of each; --version prints the build.
)";

constexpr const char* kLogitsAbout =
    R"(Runs token ids through a model and writes the logits of every position: little-endian 32-bit floats,
one row of the vocabulary's size after another, as they are computed. An interrupted run leaves the
rows of whole steps.
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
  RunConfig config;
  std::string ids_file, ids_text;
  std::vector<std::int32_t> ids;
  // logits
  std::string out;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> out_file{nullptr, std::fclose};
  // compare
  std::string run, ref, positions_text;
  std::int64_t n_vocab = 0;
  double margin_tol = 0;
  std::vector<std::int32_t>
      positions;  // of the run's rows, one for each row of the reference; empty: all
  // ppl
  std::string text_file;  // empty: another command
  std::int64_t window = 512;
  std::unique_ptr<RunLog> log;
};

std::system_error io_error(const std::string& path) {
  return std::system_error(errno ? errno : EIO, std::generic_category(), path);
}

// Rows of a raw file of floats, front to back.
class RowReader {
 public:
  RowReader(const std::string& path, std::int64_t n_vocab) : path_(path), n_vocab_(n_vocab) {
    // What cannot be read here is bad input, as a model is that is not there; a stream would open a folder.
    std::error_code forbidden;  // opening it says so
    const auto kind = std::filesystem::status(path, forbidden).type();
    if (kind == std::filesystem::file_type::not_found) {
      throw std::invalid_argument(path + ": no such file");
    }
    if (!forbidden && kind != std::filesystem::file_type::regular) {
      throw std::invalid_argument(path + ": is no regular file, expected raw floats");
    }
    errno = 0;
    file_.open(path, std::ios::binary | std::ios::ate);
    if (!file_) throw io_error(path);
    const auto bytes = static_cast<std::int64_t>(file_.tellg());
    const std::int64_t row_bytes = n_vocab * static_cast<std::int64_t>(sizeof(float));
    if (bytes == 0 || bytes % row_bytes != 0) {
      throw std::invalid_argument(
          fmt::format("{}: {} bytes, not a multiple of a row of {} floats ({} bytes)", path, bytes,
                      n_vocab, row_bytes));
    }
    n_row_ = bytes / row_bytes;
    file_.seekg(0);
    row_.resize(static_cast<std::size_t>(n_vocab));
  }
  std::int64_t n_row() const { return n_row_; }
  std::span<const float> next() {
    static_assert(std::endian::native == std::endian::little, "files are little-endian");
    if (!file_.read(reinterpret_cast<char*>(row_.data()),
                    static_cast<std::streamsize>(row_.size() * sizeof(float)))) {
      throw io_error(path_);
    }
    return row_;
  }

 private:
  std::string path_;
  std::int64_t n_vocab_;
  std::int64_t n_row_ = 0;
  std::ifstream file_;
  std::vector<float> row_;
};

// Compares rows of a run, as they come, with the reference's.
class RowComparer {
 public:
  RowComparer(const Request& request, std::int64_t n_vocab, std::int64_t n_run_row)
      : reference_(request.ref, n_vocab),
        comparer_(n_vocab, request.margin_tol),
        positions_(request.positions) {
    const auto wanted =
        positions_.empty() ? n_run_row : static_cast<std::int64_t>(positions_.size());
    if (reference_.n_row() != wanted) {
      throw std::invalid_argument(
          fmt::format("{}: {} rows, but {} {}", request.ref, reference_.n_row(),
                      positions_.empty() ? "the run has" : "--positions names", wanted));
    }
    for (std::size_t i = 0; i < positions_.size(); ++i) {
      if (positions_[i] >= n_run_row || (i > 0 && positions_[i] <= positions_[i - 1])) {
        throw std::invalid_argument(
            fmt::format("--positions: {} must rise and stay under the run's {} rows", positions_[i],
                        n_run_row));
      }
    }
  }
  void add(std::span<const float> row) {
    const std::int64_t here = at_++;
    if (!positions_.empty()) {
      if (next_ == positions_.size() || positions_[next_] != here) return;
      ++next_;
    }
    comparer_.add(row, reference_.next());
  }
  LogitComparison result() const { return comparer_.result(); }

 private:
  RowReader reference_;
  LogitComparer comparer_;
  std::vector<std::int32_t> positions_;
  std::size_t next_ = 0;
  std::int64_t at_ = 0;
};

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

// ---- options --------------------------------------------------------------------------------------------------------

void add_run_options(Options& o, Request& r) {
  add_model_options(o, r.config);
  o.group("Input");
  o.text("--ids-file", "FILE", r.ids_file,
         "Token ids, separated by blanks or line ends; -: standard input.");
  o.text("--ids", "IDS", r.ids_text, "The same on the command line: --ids '1 2 3'.");
}

void add_machine_options(Options& o, Request& r) {
  add_sequence_options(o, r.config);
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
  if (!o.given("--model")) r.config.model = default_model();
  OpenOptions open;
  open.ignore_split_count = r.config.ignore_split_count;
  const ModelFile file = ModelFile::open(r.config.model, open);
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
  add_machine_options(o, r);
  if (!parse(o, args)) return false;
  if (r.out.empty()) throw std::invalid_argument("--out: not given");
  read_ids(r, o);
  check(r.config);
  // Opened before the model is loaded: a path that cannot be written is told at once.
  errno = 0;
  r.out_file.reset(std::fopen(r.out.c_str(), "wb"));
  if (!r.out_file) throw io_error(r.out);
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
  add_machine_options(o, r);
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
    RowComparer(r, r.n_vocab, static_cast<std::int64_t>(r.ids.size()));  // does the reference fit?
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

bool prepare_ppl(Request& r, const std::vector<std::string>& args) {
  Options o(
      {"k3eval ppl", "k3eval ppl [--model FILE] --file FILE [options]", kPplAbout, kPplExamples});
  add_model_options(o, r.config);
  o.group("Input");
  o.text("--file", "FILE", r.text_file, "The text; -: standard input.");
  o.flag("--control-tokens", r.config.control_tokens,
         "Recognise control tokens in the text; else they are ordinary characters.");
  o.number("--window", "N", r.window, "Tokens in a window, and the context kept.");
  add_machine_options(o, r);
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

int compare_files(const Request& r) {
  RowReader run(r.run, r.n_vocab);
  RowComparer comparer(r, r.n_vocab, run.n_row());
  for (std::int64_t i = 0; i < run.n_row(); ++i) comparer.add(run.next());
  print_json(r, comparer.result());
  return kExitOk;
}

using RowSink = std::function<void(std::span<const float> rows, std::int64_t n_row)>;

// Rank 0: the ids through the engine, rows to `sink`, steps to the log.
void run_ids(Request& r, Engine& engine, ProgressPrinter& show, const RowSink& sink) {
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
        show(p);
        for (; r.log && n_logged < engine.timings().size(); ++n_logged) {
          r.log->step(RunLog::Phase::kPrefill, engine.timings()[n_logged]);
        }
        if (trouble) std::rethrow_exception(trouble);
        if (stop_asked() && p.done < p.total) {
          throw Interrupted(
              fmt::format("stopped on request after {} of {} tokens", p.done, p.total));
        }
      });
}

void write_logits(Request& r, Engine& engine, ProgressPrinter& show) {
  run_ids(r, engine, show, [&](std::span<const float> rows, std::int64_t) {
    errno = 0;
    if (std::fwrite(rows.data(), sizeof(float), rows.size(), r.out_file.get()) != rows.size())
      throw io_error(r.out);
  });
  errno = 0;
  if (std::fflush(r.out_file.get()) != 0) throw io_error(r.out);
}

void compare_run(Request& r, Engine& engine, ProgressPrinter& show) {
  const std::int64_t n_vocab = engine.model().n_vocab;
  RowComparer comparer(r, n_vocab, static_cast<std::int64_t>(r.ids.size()));
  run_ids(r, engine, show, [&](std::span<const float> rows, std::int64_t n_row) {
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
    for (; r.log && n_logged < engine.timings().size(); ++n_logged) {
      r.log->step(RunLog::Phase::kPrefill, engine.timings()[n_logged]);
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

std::optional<Fault> drive(Request& r, Engine& engine, ProgressPrinter& show) {
  for (const std::string& w : engine.warnings()) print_line("warning: " + w);
  std::optional<Fault> fault;
  try {
    if (r.log) {
      r.log->prompt(r.ids);
      r.log->chosen(engine.config());
      r.log->model(engine.file(), engine.model());
      r.log->warnings(engine.warnings());
      r.log->ranks("loaded", engine.reports());
    }
    if (!r.text_file.empty()) {
      measure_ppl(r, engine);
    } else {
      r.out.empty() ? compare_run(r, engine, show) : write_logits(r, engine, show);
    }
    if (r.log) r.log->ranks("ended", engine.reports());
    // These leave the ranks between two steps, from where they can end in order.
  } catch (const Interrupted&) {
    fault = fault_of(std::current_exception());
  } catch (const std::system_error&) {
    fault = fault_of(std::current_exception());
  } catch (const std::invalid_argument&) {
    fault = fault_of(std::current_exception());
  } catch (const NonFiniteError&) {
    fault = fault_of(std::current_exception());
  }
  engine.stop(fault ? fault->exit_code : kExitOk);
  return fault;
}

std::optional<Fault> close_log(Request& r, const std::optional<Fault>& fault) {
  if (!r.log) return fault;
  r.log->close(!fault                                 ? "finished"
               : fault->exit_code == kExitInterrupted ? "interrupted"
                                                      : "failed",
               fault ? "" : "all ids", fault ? fault->line : "");
  const std::optional<std::string> trouble = r.log->trouble();
  return trouble && !fault ? Fault{kExitEnvironment, *trouble} : fault;
}

int run_engine(Request& r, World& world, Comm& comm, const RunConfig& config) {
  ProgressPrinter show;
  const RankDevice device = make_rank_device(config, world, comm);
  Engine engine(config, device.comm(comm), *device.backend, [&](const Progress& p) {
    if (world.rank() == 0) show(p);
    if (stop_asked()) throw Interrupted("stopped on request while loading");
  });
  std::optional<Fault> fault;
  if (world.rank() == 0) {
    fault = close_log(r, drive(r, engine, show));
  } else {
    engine.serve();
  }
  comm.agree(fault);
  return kExitOk;
}

using Prepare = std::function<bool(Request&)>;

int run(const Prepare& prepare, const std::string& command_line, World& world, Comm& comm) {
  Request r;
  std::optional<RunConfig> config;
  on_rank_0(comm, [&] {
    if (!prepare(r)) return;
    config = r.config;
    if (!r.config.log.empty()) {
      r.log = std::make_unique<RunLog>(r.config.log,
                                       run_facts("k3eval", command_line, r.config, world));
    }
  });
  config = share_config(comm, config);
  if (!config) return kExitOk;
  comm.set_time_limit(config->time_limit_s);
  if (config->threads == 0) config->threads = threads_per_rank(world, comm);
  stop_on_signals();
  try {
    return run_engine(r, world, comm, *config);
  } catch (...) {
    // After close_log() this changes nothing.
    const Fault fault = fault_of(std::current_exception());
    if (r.log)
      r.log->close(fault.exit_code == kExitInterrupted ? "interrupted" : "failed", "", fault.line);
    throw;
  }
}

// Whether the options ask for two files, which needs no ranks; malformed ones are for rank 0 to refuse.
bool wants_files_only(const std::string& command, const std::vector<std::string>& args) {
  return command == "compare" && std::any_of(args.begin(), args.end(), [](const std::string& a) {
           return a == "--run" || a.rfind("--run=", 0) == 0;
         });
}

int compare_files_main(const std::vector<std::string>& args) {
  Request r;
  Options o = compare_options(r);
  if (!parse(o, args)) return kExitOk;
  check_compare(r, o);
  return compare_files(r);
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  std::vector<std::string> args = k3::arguments(argc, argv);
  const std::string command = args.empty() ? "" : args[0];
  if (!args.empty()) args.erase(args.begin());
  if (k3::wants_files_only(command, args)) {
    return k3::local_main("k3eval", [&] { return k3::compare_files_main(args); });
  }
  const auto prepare = [&](k3::Request& r) -> bool {
    if (command == "--help" || command == "-h") return k3::write_out(k3::kHelp), false;
    if (command == "--version") return k3::write_out(k3::full_version_text("k3eval")), false;
    if (command == "logits") return k3::prepare_logits(r, args);
    if (command == "ppl") return k3::prepare_ppl(r, args);
    if (command == "compare") {
      k3::Options o = k3::compare_options(r);
      if (!k3::parse(o, args)) return false;
      k3::check_compare(r, o);
      return true;
    }
    throw std::invalid_argument(
        command.empty() ? "a command is missing: logits, compare or ppl; k3eval --help"
                        : command + ": not a command; logits, compare or ppl; k3eval --help");
  };
  return k3::rank_main("k3eval", [&](k3::World& world, k3::Comm& comm) {
    return k3::run(prepare, k3::shell_quoted(argc, argv), world, comm);
  });
}
