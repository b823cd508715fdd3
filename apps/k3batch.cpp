// k3batch: many requests in, their answers out, a line each.
#include <array>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <fmt/core.h>

#include "apps/batch_run.h"
#include "apps/batch_settings.h"
#include "apps/build_info.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/run_session.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

constexpr const char* kSynopsis =
    R"(k3batch [--model FILE] --input FILE.jsonl --output FILE.jsonl [options]
... | k3batch [--model FILE] [options] > answers.jsonl
mpirun -n P k3batch ...)";

constexpr const char* kAbout =
    R"(Answers many requests, as many at a time as there are --slots, over as many MPI ranks as it is
started on. A request is a line of JSON:
  {"id": "a", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
  {"id": "b", "messages": [{"role": "user", "content": "Hello"}], "seed": 7, "stop": ["\n\n"]}
Members: id or custom_id; prompt, or messages with tools, tool_choice, response_format and
reasoning_effort as in the OpenAI chat format; max_tokens, temperature, top_k, top_p, min_p,
repetition_penalty, presence_penalty, seed, stop, logprobs, ignore_eos. What a line does not say comes
from the options below. {"custom_id", "method", "url", "body": {...}} of hosted batch services is read,
too. Blank lines are passed over.

An answer is a line of JSON, in the order in which answers are ready; "line" is the request's line:
  {"id": "a", "line": 1, "line_hash": ..., "text": " Paris.", "finish_reason": "stop", "ids": [...],
   "usage": {...}, "timings": {...}}
with "message" (content, reasoning_content, tool_calls) in a chat, "stop" where a stop string ended it
and "logprobs" on request. A line that is no request gets {"id", "line", "line_hash", "error": {code,
message}}, and the job goes on.

A line is on the disk (fsync) before the next step begins. Whatever ends the job, the same command with
--resume answers what is missing: no line is lost, none is there twice, none changes. SIGTERM, SIGINT
and SIGUSR1 (Slurm: --signal=USR1@60) take no more requests and let running ones finish for --grace
seconds; exit code 5 then says that --resume has something to do. A full disk ends it with 3 and can be
resumed, too.
)";

constexpr const char* kExamples =
    R"(  k3batch --input questions.jsonl --output answers.jsonl --temp 0
  mpirun -n 8 k3batch --backend cuda --comm peer --model K3-00001-of-00014.gguf --slots 32 \
      --input in.jsonl --output out.jsonl --resume --log batch.h5
)";

// Rank 0's share of a batch.
struct Session {
  RunConfig config;
  std::string input = "-", output = "-", effort;
  bool resume = false;
  BatchOptions batch;
  BatchDefaults defaults;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<LineReader> in;
  std::unique_ptr<BatchOutput> out;
  JobNotes notes;
};

void add_options(Options& o, Session& s) {
  add_model_options(o, s.config);
  o.group("Batch");
  o.text("--input", "FILE", s.input, "Requests, a line each; -: standard input.");
  o.text("--output", "FILE", s.output, "Answers, a line each; -: standard output.");
  o.flag("--resume", s.resume,
         "Goes on where --output ends, if it is there; without it, one that holds anything is "
         "refused.");
  s.config.n_slot = 8;
  o.number("--slots", "N", s.config.n_slot, "Requests answered at once.");
  o.number("--grace", "SECONDS", s.batch.grace_s,
           "How long running requests may go on once the job is asked to end.");
  o.number("--prefixes", "N", s.batch.n_prefix,
           "States kept, in host memory, for prompts that begin alike. 0: none.");
  o.text("--session", "FILE", s.batch.session,
         "A sequence that k3run --save-session stored: prompts go on where it ends, and chats that "
         "begin with it do not read it again.");
  o.choice(
      "--thinking-effort", {"off", "low", "high", "max"}, 3,
      [&s](std::size_t i) {
        s.effort = std::array{"off", "low", "high", "max"}[i];
      },
      "How much the model thinks before it answers, in chats that do not say. [default: max]");
  o.flag("--control-tokens", s.config.control_tokens,
         "Reads control tokens such as <|open|> in a prompt as tokens.");
  add_sampling_options(o, s.config);
  add_sequence_options(o, s.config);
  add_world_options(o, s.config);
  add_log_options(o, s.config);
}

bool parse(Options& options, const std::vector<std::string>& args) {
  const Options::Outcome outcome = options.parse(args);
  if (outcome == Options::Outcome::kHelp) write_out(options.help());
  if (outcome == Options::Outcome::kVersion) write_out(full_version_text("k3batch"));
  return outcome == Options::Outcome::kRun;
}

void check_batch(const Session& s) {
  check(s.config);
  if (s.config.n_predict < 1) throw std::invalid_argument("--predict 0: expected 1 or more");
  if (s.config.chunk_tok < s.config.n_slot) {
    throw std::invalid_argument(
        fmt::format("--chunk {}: a step has no room for a token of each of --slots {}",
                    s.config.chunk_tok, s.config.n_slot));
  }
  if (!(s.batch.grace_s >= 0 && s.batch.grace_s <= 1e6))
    throw std::invalid_argument(fmt::format("--grace {}: must lie in 0 to 1e6", s.batch.grace_s));
  if (s.batch.n_prefix < 0 || s.batch.n_prefix > 4096)
    throw std::invalid_argument(
        fmt::format("--prefixes {}: must lie in 0 to 4096", s.batch.n_prefix));
  if (s.resume && s.output == "-") throw std::invalid_argument("--resume: needs --output FILE");
}

// What can be wrong is found from the headers alone, before gigabytes are read.
void open_files(Session& s, bool predict_given) {
  OpenOptions open;
  open.ignore_split_count = s.config.ignore_split_count;
  const ModelFile file = ModelFile::open(s.config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  if (s.input != "-") inputs.push_back(s.input);
  refuse_to_replace("--output", s.output, inputs);
  inputs.push_back(s.output);
  refuse_to_replace("--log", s.config.log, inputs);
  std::vector<std::string> dialects;  // the engine reports them
  const ModelConfig model =
      read_model_config(file.metadata(), file.tensors(), s.config.model, dialects);
  s.tokenizer.emplace(read_vocab(file.metadata(), s.config.model));
  BatchDefaults& d = s.defaults;
  d.n_ctx = s.config.n_ctx > 0 ? s.config.n_ctx : std::min(model.n_ctx, kDefaultContext);
  d.n_vocab = model.n_vocab;
  d.sampler = s.config.sampler;
  d.n_predict = s.config.n_predict;
  d.predict_given = predict_given;
  d.ignore_eos = s.config.ignore_eos;
  d.control_tokens = s.config.control_tokens;
  if (!s.batch.session.empty())
    d.before = session_ids(s.batch.session, file.fingerprint(), d.n_ctx);
  if (!s.effort.empty()) d.effort = parse_thinking_effort(s.effort);
  s.in = std::make_unique<LineReader>(s.input);
  s.out = std::make_unique<BatchOutput>(s.output, s.resume);
  if (s.output != "-") {
    keep_settings(s.output + ".settings.json",
                  batch_settings(s.config, s.defaults, file.fingerprint()),
                  s.out->done().count() > 0);
  }
}

std::optional<RunConfig> prepare(Session& s, int argc, char** argv, World& world) {
  Options options({"k3batch", kSynopsis, kAbout, kExamples});
  add_options(options, s);
  if (!parse(options, arguments(argc, argv))) return std::nullopt;
  if (!options.given("--model")) s.config.model = default_model();
  check_batch(s);
  open_files(s, options.given("--predict"));
  std::string line = fmt::format("k3batch {}, {} rank{}: {} to {}", build_info().version,
                                 world.size(), world.size() == 1 ? "" : "s", s.input, s.output);
  for (const auto& [name, value] : describe(s.config)) {
    if (!value.empty() && value != "no") line += " --" + name + (value == "yes" ? "" : " " + value);
  }
  print_line(line);
  if (s.resume) {
    print_line(fmt::format(
        "{}: {} lines are answered{}", s.output, s.out->done().count(),
        s.out->bytes_cut() > 0
            ? fmt::format(", {} bytes of a line that broke off are cut", s.out->bytes_cut())
            : ""));
  }
  if (!s.config.log.empty()) {
    RunFacts facts = run_facts("k3batch", shell_quoted(argc, argv), s.config, world);
    facts.options.insert(facts.options.end(), {{"input", s.input},
                                               {"output", s.output},
                                               {"prefixes", fmt::format("{}", s.batch.n_prefix)}});
    s.notes.log = std::make_unique<RunLog>(s.config.log, facts);
  }
  return s.config;
}

void report(Session& s, const BatchRun& run) {
  const BatchStats& stats = run.stats();
  const BatchPlace place = run.place();
  s.notes.show.finish();
  print_line(fmt::format(
      "{} requests answered, {} lines failed{}; {} prompt tokens read, {} reused, {} generated in "
      "{:.1f} s ({:.1f} tok/s); TTFT p50 {:.1f} p99 {:.1f} ms, TPOT p50 {:.2f} p99 {:.2f} ms",
      stats.n_answered, stats.n_failed,
      stats.n_before > 0 ? fmt::format(", {} were there before", stats.n_before) : "",
      stats.n_prompt_tok, stats.n_reused_tok, stats.n_token, place.seconds,
      place.seconds > 0 ? static_cast<double>(stats.n_token) / place.seconds : 0,
      1e3 * stats.ttft_s.at(0.5), 1e3 * stats.ttft_s.at(0.99), 1e3 * stats.tpot_s.at(0.5),
      1e3 * stats.tpot_s.at(0.99)));
  if (s.notes.log) log_stats(*s.notes.log, stats, place.seconds);
}

std::optional<Fault> drive(Session& s, Engine& engine) {
  const std::optional<Fault> fault = guarded(engine, [&] {
    begin_notes(s.notes, engine);
    for (const std::string& w : s.tokenizer->warnings()) print_line("warning: " + w);
    BatchRun run(engine, *s.tokenizer, *s.in, *s.out, s.defaults, s.batch);
    run.run([&] { return stop_asked() || engine.stop_requested(); },
            [&] { s.notes.show.line([&] { return status_line(run.stats(), run.place()); }); });
    report(s, run);
    if (s.notes.log) s.notes.log->ranks("ended", engine.reports());
    if (run.n_unfinished() > 0 || !run.input_ended()) {
      throw Interrupted(
          fmt::format("stopped on request after {} lines{}",
                      run.stats().n_answered + run.stats().n_failed + run.stats().n_before,
                      s.output == "-" ? "" : "; --resume answers the rest"));
    }
  });
  return close_log(s.notes, fault, "end of input");
}

int run(int argc, char** argv, World& world, Comm& comm) {
  Session s;
  return run_job(
      world, comm, s.notes, [&] { return prepare(s, argc, argv, world); },
      [&](const RunConfig& config) {
        with_engine(world, comm, s.notes, config, [&](Engine& engine) { return drive(s, engine); });
      });
}

int print_page(int argc, char** argv) {
  return page_main("k3batch", [&] {
    Session s;
    Options options({"k3batch", kSynopsis, kAbout, kExamples});
    add_options(options, s);
    parse(options, arguments(argc, argv));
  });
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  if (k3::asks_for_page(k3::arguments(argc, argv))) return k3::print_page(argc, argv);
  return k3::rank_main("k3batch", [&](k3::World& world, k3::Comm& comm) {
    return k3::run(argc, argv, world, comm);
  });
}
