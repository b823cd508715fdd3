// k3run: prompt in, text out.
#include <unistd.h>

#include <chrono>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/core.h>

#include "apps/build_info.h"
#include "apps/device.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/progress.h"
#include "loader/parts.h"
#include "rank/detokenizer.h"
#include "rank/fault.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kSynopsis = R"(k3run [--model FILE] --prompt TEXT [options]
k3run [--model FILE] --prompt-file FILE [options]
... | k3run [--model FILE] [options]
mpirun -n P k3run ...)";

constexpr const char* kAbout =
    R"(Continues a text with a Kimi K3 model in a GGUF file, over as many MPI ranks as it is started on.

The prompt is used as it is, without chat markup. It may hold any bytes: what is not UTF-8 is
tokenized byte by byte. One line end at the end of a prompt from a file or from standard input is
dropped. Generation ends at the file's end token, [EOS] or <|end_of_msg|>, after --predict tokens,
when --ctx is full, or on request: Ctrl-C, SIGTERM or SIGUSR1 end it after the current step, a
second Ctrl-C at once. mpirun passes SIGUSR1 on and ends with our exit code; interrupted itself, it
gives the ranks one second and ends with a code of its own.

Standard output gets the generated text, as it comes and always valid UTF-8, and a line end where it
has none. All else goes to standard error: options, progress, warnings and one line of numbers.
TTFT: ms from the prompt's ids to the first token; TPOT: mean ms per later token.
)";

constexpr const char* kExamples = R"(  k3run --prompt 'The capital of France is' -n 16 --temp 0
  mpirun -n 4 k3run --model K3-00001-of-00009.gguf --tp 2 --pp 2 --prompt-file q.txt --log run.h5
  echo 'Once upon a time' | k3run --seed 7
)";

// Where a prompt comes from, and its ids.
struct Prompt {
  std::string text;
  std::string file;
  std::string where;  // for errors
  std::vector<std::int32_t> ids;
};

// Rank 0's share of a run: everything that people see.
struct Session {
  RunConfig config;
  Prompt prompt;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<RunLog> log;
  ProgressPrinter progress;
};

struct Generation {
  std::int64_t n_text = 0;  // tokens printed
  std::string reason;
  double ttft_s = 0;
  double later_s = 0;  // all tokens after the first
  std::int64_t n_later = 0;
};

double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

void read_prompt(Prompt& prompt, const Options& options) {
  const bool from_file = options.given("--prompt-file");
  if (options.given("--prompt") && from_file) {
    throw std::invalid_argument("--prompt and --prompt-file: give one of the two");
  }
  if (options.given("--prompt") && prompt.text != "-") {
    prompt.where = "--prompt";
    return;
  }
  if (!from_file && !options.given("--prompt") && isatty(STDIN_FILENO) == 1) {
    throw std::invalid_argument(
        "--prompt: not given, and standard input is a terminal; k3run --help");
  }
  const std::string path = from_file ? prompt.file : "-";
  prompt.where = path == "-" ? "standard input" : path;
  prompt.text = read_text(path);
  // Editors and echo end a file with a line end that nobody means.
  if (!prompt.text.empty() && prompt.text.back() == '\n') prompt.text.pop_back();
}

// Everything about the prompt that can be wrong is found here, from the headers alone, before gigabytes are read.
void encode_prompt(Session& s) {
  OpenOptions open;
  open.ignore_split_count = s.config.ignore_split_count;
  const ModelFile file = ModelFile::open(s.config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  inputs.push_back(s.prompt.file);
  refuse_to_replace("--log", s.config.log, inputs);
  std::vector<std::string> dialects;  // the engine reports them
  const ModelConfig model =
      read_model_config(file.metadata(), file.tensors(), s.config.model, dialects);
  s.tokenizer.emplace(read_vocab(file.metadata(), s.config.model));
  s.prompt.ids = s.tokenizer->encode(
      s.prompt.text, s.config.control_tokens ? ControlText::kRecognised : ControlText::kAsText);
  if (s.prompt.ids.empty()) throw std::invalid_argument(s.prompt.where + ": the prompt is empty");
  check_ids(s.prompt.ids, model.n_vocab, s.prompt.where);
  const std::int64_t limit = std::min(model.n_ctx, kDefaultContext);
  const std::int64_t n_ctx = s.config.n_ctx > 0 ? s.config.n_ctx : limit;
  if (static_cast<std::int64_t>(s.prompt.ids.size()) > n_ctx) {
    throw std::invalid_argument(fmt::format(
        "{}: the prompt has {} tokens, --ctx is {}{} (the model's limit is {})", s.prompt.where,
        s.prompt.ids.size(), n_ctx, s.config.n_ctx > 0 ? "" : ", the default", model.n_ctx));
  }
}

// Options, prompt and log; nothing on the line means that there is nothing to run (--help).
std::optional<RunConfig> prepare(Session& s, int argc, char** argv, World& world) {
  Options options({"k3run", kSynopsis, kAbout, kExamples});
  add_model_options(options, s.config);
  options.group("Prompt");
  options.text("--prompt", "TEXT", s.prompt.text,
               "The text to continue; -: standard input. [default: standard input, unless it is a "
               "terminal]");
  options.text("--prompt-file", "FILE", s.prompt.file, "Reads the prompt from FILE.");
  options.flag("--control-tokens", s.config.control_tokens,
               "Reads control tokens such as <|open|> in the prompt as tokens, and writes those "
               "generated. Without it "
               "they are ordinary text in the prompt, and left out of the output.");
  add_sampling_options(options, s.config);
  add_sequence_options(options, s.config);
  add_world_options(options, s.config);
  add_log_options(options, s.config);
  const Options::Outcome outcome = options.parse(arguments(argc, argv));
  if (outcome == Options::Outcome::kHelp) write_out(options.help());
  if (outcome == Options::Outcome::kVersion) write_out(full_version_text("k3run"));
  if (outcome != Options::Outcome::kRun) return std::nullopt;
  if (!options.given("--model")) s.config.model = default_model();
  check(s.config);
  read_prompt(s.prompt, options);
  encode_prompt(s);

  std::string line = std::string("k3run ") + build_info().version + ", " +
                     std::to_string(world.size()) + (world.size() == 1 ? " rank:" : " ranks:");
  for (const auto& [name, value] : describe(s.config)) {
    if (name != "slots" && !value.empty() && value != "no")
      line += " --" + name + (value == "yes" ? "" : " " + value);
  }
  print_line(line);
  if (!s.config.log.empty()) {
    s.log = std::make_unique<RunLog>(s.config.log,
                                     run_facts("k3run", shell_quoted(argc, argv), s.config, world));
    s.log->prompt(s.prompt.ids);
  }
  return s.config;
}

// Logs the forward steps that the engine has made since the last call.
class StepLogger {
 public:
  StepLogger(RunLog* log, const Engine& engine) : log_(log), engine_(engine) {}
  void operator()(RunLog::Phase phase) {
    const std::vector<StepTiming>& all = engine_.timings();
    for (; n_logged_ < all.size(); ++n_logged_) {
      if (log_) log_->step(phase, all[n_logged_]);
    }
  }

 private:
  RunLog* log_;
  const Engine& engine_;
  std::size_t n_logged_ = 0;
};

// Why generation must not go on after token number `n_drawn`, or nothing.
std::string stop_reason(const Session& s, const Engine& engine, const Decision& d,
                        std::int64_t n_drawn) {
  if (!s.config.ignore_eos && s.tokenizer->is_stop(d.id))
    return "end token " + s.tokenizer->bytes(d.id);
  if (n_drawn >= engine.config().n_predict) return "length";
  if (engine.length(0) >= engine.config().n_ctx) return "context full";
  if (engine.stop_requested()) return "interrupted";
  return {};
}

void generate(Session& s, Engine& engine, Generation& out) {
  Detokenizer text(*s.tokenizer, {.skip_control = !s.config.control_tokens, .raw = false});
  StepLogger log_steps(s.log.get(), engine);
  const auto prefill_progress = [&](const Progress& p) {
    log_steps(RunLog::Phase::kPrefill);
    s.progress(p);
    if (stop_asked() && p.done < p.total) {
      throw Interrupted(
          fmt::format("stopped on request after {} of {} prompt tokens", p.done, p.total));
    }
  };
  bool line_open = false;  // the text so far does not end in a line end
  const auto emit = [&](const std::string& piece) {
    if (piece.empty()) return;
    line_open = piece.back() != '\n';
    write_out(piece);
  };
  engine.reset(0);
  Clock::time_point before = Clock::now();
  Decision d = engine.extend(0, s.prompt.ids, engine.config().sampler, 0, false, prefill_progress);
  log_steps(RunLog::Phase::kPrefill);
  for (std::uint64_t draw = 1;; ++draw) {
    const double seconds = seconds_since(before);
    before = Clock::now();
    if (draw == 1) {
      out.ttft_s = seconds;
    } else {
      out.later_s += seconds;
      ++out.n_later;
    }
    if (s.config.n_predict == 0) {
      out.reason = "length";
      break;
    }
    if (s.log) s.log->token(d, seconds);
    const bool ends = !s.config.ignore_eos && s.tokenizer->is_stop(d.id);
    if (!ends) {
      ++out.n_text;
      emit(text.push(d.id));
    }
    out.reason = stop_reason(s, engine, d, static_cast<std::int64_t>(draw));
    if (!out.reason.empty()) break;
    const std::int32_t id = d.id;
    d = engine.extend(0, std::span(&id, 1), engine.config().sampler, draw, true);
    log_steps(RunLog::Phase::kDecode);
  }
  emit(text.flush());
  if (line_open) write_out("\n");
}

void report(Session& s, const Generation& g) {
  const auto n_prompt = static_cast<double>(s.prompt.ids.size());
  const double prefill = g.ttft_s > 0 ? n_prompt / g.ttft_s : 0;
  const double tpot_ms = g.n_later > 0 ? 1e3 * g.later_s / static_cast<double>(g.n_later) : 0;
  std::string line =
      fmt::format("prompt {} tokens, TTFT {:.1f} ms, prefill {:.1f} tok/s, generated {} tokens",
                  s.prompt.ids.size(), 1e3 * g.ttft_s, prefill, g.n_text);
  if (g.n_later > 0)
    line += fmt::format(", TPOT {:.2f} ms, decode {:.1f} tok/s", tpot_ms, 1e3 / tpot_ms);
  s.progress.finish();
  print_line(line + ", ended by: " + g.reason);
  if (!s.log) return;
  s.log->summary("prompt_tokens", n_prompt);
  s.log->summary("generated_tokens", static_cast<double>(g.n_text));
  s.log->summary("ttft_ms", 1e3 * g.ttft_s);
  s.log->summary("prefill_tok_s", prefill);
  if (g.n_later > 0) {
    s.log->summary("tpot_ms", tpot_ms);
    s.log->summary("decode_tok_s", 1e3 / tpot_ms);
  }
}

// Rank 0 drives; what it returns all ranks agree on.
std::optional<Fault> drive(Session& s, Engine& engine) {
  for (const std::string& w : engine.warnings()) print_line("warning: " + w);
  for (const std::string& w : s.tokenizer->warnings()) print_line("warning: " + w);
  if (s.log) {
    s.log->chosen(engine.config());
    s.log->model(engine.file(), engine.model());
    s.log->warnings(engine.warnings());
    s.log->ranks("loaded", engine.reports());
  }
  Generation g;
  std::optional<Fault> fault;
  try {
    generate(s, engine, g);
    report(s, g);
    if (g.reason == "interrupted") {
      fault = Fault{kExitInterrupted, fmt::format("stopped on request after {} tokens", g.n_text)};
    }
    if (s.log) s.log->ranks("ended", engine.reports());
    // After these three the ranks stand between two steps and can end in order; after any other error they do not.
  } catch (const Interrupted&) {
    fault = fault_of(std::current_exception());
  } catch (const std::system_error&) {  // standard output
    fault = fault_of(std::current_exception());
  } catch (const NonFiniteError&) {
    fault = fault_of(std::current_exception());
  }
  engine.stop(fault ? fault->exit_code : kExitOk);
  if (!s.log) return fault;
  s.log->close(!fault                                 ? "finished"
               : fault->exit_code == kExitInterrupted ? "interrupted"
                                                      : "failed",
               g.reason, fault ? fault->line : "");
  if (const std::optional<std::string> trouble = s.log->trouble()) {
    // The one line of this job; an interruption is the smaller news.
    fault = Fault{kExitEnvironment,
                  *trouble + "; the text is whole, the log ends at its last snapshot"};
  }
  return fault;
}

int run_job(Session& s, World& world, Comm& comm, const RunConfig& config) {
  const RankDevice device = make_rank_device(config, world, comm);
  const ProgressFn on_load = [&](const Progress& p) {
    if (world.rank() == 0) s.progress(p);
    if (stop_asked()) throw Interrupted("stopped on request while loading");
  };
  Engine engine(config, device.comm(comm), *device.backend, on_load);
  std::optional<Fault> fault;
  if (world.rank() == 0) {
    fault = drive(s, engine);
  } else {
    engine.serve();
  }
  comm.agree(fault);
  return kExitOk;
}

int run(int argc, char** argv, World& world, Comm& comm) {
  Session s;
  std::optional<RunConfig> config;
  on_rank_0(comm, [&] { config = prepare(s, argc, argv, world); });
  config = share_config(comm, config);
  if (!config) return kExitOk;
  comm.set_time_limit(config->time_limit_s);
  if (config->threads == 0) config->threads = threads_per_rank(world, comm);
  stop_on_signals();
  try {
    return run_job(s, world, comm, *config);
  } catch (...) {
    const Fault fault = fault_of(std::current_exception());
    s.progress.finish();
    if (s.log)
      s.log->close(fault.exit_code == kExitInterrupted ? "interrupted" : "failed", "", fault.line);
    throw;
  }
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  return k3::rank_main(
      "k3run", [&](k3::World& world, k3::Comm& comm) { return k3::run(argc, argv, world, comm); });
}
