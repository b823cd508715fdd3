// k3run: prompt in, text out.
#include <unistd.h>

#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/core.h>

#include "apps/build_info.h"
#include "apps/chat_options.h"
#include "apps/generation.h"
#include "apps/interactive.h"
#include "apps/job.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/reply_text.h"
#include "apps/run_session.h"
#include "loader/parts.h"
#include "rank/chat_json.h"
#include "rank/detokenizer.h"
#include "rank/fault.h"
#include "rank/json_text.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

constexpr const char* kSynopsis = R"(k3run [--model FILE] --prompt TEXT [options]
k3run [--model FILE] --prompt-file FILE [options]
... | k3run [--model FILE] [options]
k3run [--model FILE] --chat FILE.json [--chat-user TEXT] [options]
k3run [--model FILE] [--system TEXT] --chat-user TEXT [options]
k3run [--model FILE] --interactive [options]
mpirun -n P k3run ...)";

constexpr const char* kAbout =
    R"(Continues a text, or replies in a chat, with a Kimi K3 model in a GGUF file, over as many MPI ranks
as it is started on.

A prompt is used as it is, without chat markup. It may hold any bytes: what is not UTF-8 is
tokenized byte by byte. One line end at the end of a prompt from a file or from standard input is
dropped. Generation ends at the file's end token, [EOS] or <|end_of_msg|>, after --predict tokens,
when --ctx is full, or on request: Ctrl-C, SIGTERM or SIGUSR1 end it after the current step, a
second Ctrl-C at once. mpirun passes SIGUSR1 on and ends with our exit code; interrupted itself, it
gives the ranks one second and ends with a code of its own.

A chat (--chat, --chat-user, --interactive) is put into K3's markup, in which nothing that anybody
typed is markup, and --predict is what the context has room for unless it is given. The reply is
taken apart while it comes: thinking, answer, calls of tools. It ends for a reason: stop, length
(--predict or --ctx), tool_calls, interrupted.

--interactive talks at rank 0's terminal: the keys come over standard input, which mpirun passes on
to rank 0, and Ctrl-C is a key that stops the reply; mpirun never sees it. It must be started in the
terminal's foreground, with rank 0 on that host (srun: --pty). Once the model is loaded:
  /reset   a new conversation; system messages and tools stay
  /quit    ends; Ctrl-D, or Ctrl-C twice on an empty line, does too
  /help    lists these

Standard output gets the generated text, as it comes and always valid UTF-8, and a line end where it
has none. All else goes to standard error: options, progress, warnings and one line of numbers.
TTFT: ms from the prompt's ids to the first token; TPOT: mean ms per later token.
)";

constexpr const char* kExamples = R"(  k3run --prompt 'The capital of France is' -n 16 --temp 0
  mpirun -n 4 k3run --model K3-00001-of-00009.gguf --tp 2 --pp 2 --prompt-file q.txt --log run.h5
  echo 'Once upon a time' | k3run --seed 7
  k3run --chat-user 'What is the capital of Italy?' --thinking-effort off --temp 0
  k3run --chat request.json --output json > reply.json
  mpirun -n 2 k3run --interactive --system 'Answer briefly.'
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
  ChatOptions chat;
  NamedTexts chat_texts;               // the chat's options that were given
  std::optional<ChatRequest> request;  // a chat
  Prompt prompt;
  SessionOptions stored;
  std::vector<std::int32_t> before;  // ids that --session has read; prompt.ids go on after them
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Terminal> terminal;  // --interactive
  JobNotes notes;
};

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
        "--prompt: not given, and standard input is a terminal (--interactive chats there); k3run "
        "--help");
  }
  const std::string path = from_file ? prompt.file : "-";
  prompt.where = path == "-" ? "standard input" : path;
  prompt.text = read_text(path);
  // Editors and echo end a file with a line end that nobody means.
  if (!prompt.text.empty() && prompt.text.back() == '\n') prompt.text.pop_back();
}

// Everything about the prompt that can be wrong is found here, from the headers alone, before gigabytes are read.
void encode_prompt(Session& s, bool predict_given) {
  OpenOptions open;
  open.ignore_split_count = s.config.ignore_split_count;
  const ModelFile file = ModelFile::open(s.config.model, open);
  std::vector<std::string> inputs = part_paths(file);
  inputs.insert(inputs.end(), {s.prompt.file, s.chat.file});
  refuse_to_replace("--log", s.config.log, inputs);
  std::vector<std::string> dialects;  // the engine reports them
  const ModelConfig model =
      read_model_config(file.metadata(), file.tensors(), s.config.model, dialects);
  s.tokenizer.emplace(read_vocab(file.metadata(), s.config.model));
  const std::int64_t limit = std::min(model.n_ctx, kDefaultContext);
  const std::int64_t n_ctx = s.config.n_ctx > 0 ? s.config.n_ctx : limit;
  if (s.request && !predict_given) s.config.n_predict = n_ctx;
  if (!s.request) {
    s.prompt.ids = s.tokenizer->encode(
        s.prompt.text, s.config.control_tokens ? ControlText::kRecognised : ControlText::kAsText);
  } else if (!s.request->messages.empty()) {
    s.prompt.ids = s.tokenizer->encode_segments(render_chat(*s.request));
  }
  if (!s.stored.load.empty()) {
    SessionPrompt p = after_session(session_ids(s.stored.load, file.fingerprint(), n_ctx),
                                    std::move(s.prompt.ids), s.request.has_value(), s.prompt.where,
                                    s.stored.load);
    s.before = std::move(p.before);
    s.prompt.ids = std::move(p.ids);
  }
  if (s.prompt.ids.empty() && !s.chat.interactive) {
    throw std::invalid_argument(s.prompt.where + ": the prompt is empty");
  }
  check_ids(s.prompt.ids, model.n_vocab, s.prompt.where);
  if (std::ssize(s.before) + std::ssize(s.prompt.ids) > n_ctx) {
    throw std::invalid_argument(
        fmt::format("{}: the prompt has {} tokens{}, --ctx is {}{} (the model's limit is {})",
                    s.prompt.where, s.prompt.ids.size(),
                    s.before.empty() ? "" : fmt::format(" after {} of --session", s.before.size()),
                    n_ctx, s.config.n_ctx > 0 ? "" : ", the default", model.n_ctx));
  }
}

void add_options(Options& options, Session& s) {
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
  options.text(
      "--session", "FILE", s.stored.load,
      "Goes on where the sequence stored there ends: the prompt is read after it. A chat must "
      "be the conversation that it has read, and more.");
  options.text("--save-session", "FILE", s.stored.save,
               "Stores what has been read, prompt and text, in FILE and one more file a rank; for "
               "these or other ranks. With -n 0 the prompt alone.");
  add_chat_options(options, s.chat);
  add_sampling_options(options, s.config);
  add_sequence_options(options, s.config);
  add_world_options(options, s.config);
  add_log_options(options, s.config);
}

void read_chat(Session& s, const Options& options) {
  std::vector<std::string> ignored;
  s.request = read_chat_request(options, s.chat, ignored);
  s.prompt.where = !options.given("--chat") ? "--chat-user"
                   : s.chat.file == "-"     ? "standard input"
                                            : s.chat.file;
  for (const std::string& name : ignored) {
    print_line(fmt::format("warning: {}: {}: has no effect here", s.prompt.where, name));
  }
  s.chat_texts = describe(options, s.chat);
}

// False: there is nothing to run, a page has been printed.
bool parse(Options& options, const std::vector<std::string>& args) {
  const Options::Outcome outcome = options.parse(args);
  if (outcome == Options::Outcome::kHelp) write_out(options.help());
  if (outcome == Options::Outcome::kVersion) write_out(full_version_text("k3run"));
  return outcome == Options::Outcome::kRun;
}

// Options, prompt and log.
std::optional<RunConfig> prepare(Session& s, int argc, char** argv, World& world) {
  Options options({"k3run", kSynopsis, kAbout, kExamples});
  add_options(options, s);
  if (!parse(options, arguments(argc, argv))) return std::nullopt;
  if (!options.given("--model")) s.config.model = default_model();
  check(s.config);
  check_chat_options(options, s.chat);
  if (s.chat.interactive && (!s.stored.load.empty() || !s.stored.save.empty()))
    throw std::invalid_argument("--interactive: not with --session or --save-session");
  wants_chat(options) ? read_chat(s, options) : read_prompt(s.prompt, options);
  encode_prompt(s, options.given("--predict"));
  if (s.chat.interactive) {
    s.terminal = std::make_unique<Terminal>();
    s.terminal->take_notes();
  }

  NamedTexts shown = describe(s.config);
  shown.insert(shown.end(), s.chat_texts.begin(), s.chat_texts.end());
  std::string line = std::string("k3run ") + build_info().version + ", " +
                     std::to_string(world.size()) + (world.size() == 1 ? " rank:" : " ranks:");
  for (const auto& [name, value] : shown) {
    if (name != "slots" && !value.empty() && value != "no")
      line += " --" + name + (value == "yes" ? "" : " " + value);
  }
  print_line(line);
  if (!s.config.log.empty()) {
    RunFacts facts = run_facts("k3run", shell_quoted(argc, argv), s.config, world);
    facts.options.insert(facts.options.end(), s.chat_texts.begin(), s.chat_texts.end());
    s.notes.log = std::make_unique<RunLog>(s.config.log, facts);
  }
  return s.config;
}

// ---- one text -------------------------------------------------------------------------------------------------------

// Standard output, with a line end at its end where there was any text.
class Out {
 public:
  void operator()(const std::string& piece) {
    if (piece.empty()) return;
    line_open_ = piece.back() != '\n';
    write_out(piece);
  }
  void end() {
    if (line_open_) write_out("\n");
    line_open_ = false;
  }

 private:
  bool line_open_ = false;
};

std::string ending_text(const Session& s, const Generation& g) {
  switch (g.ending) {
    case Generation::Ending::kEndToken:
      return "end token " + s.tokenizer->bytes(g.ids.back());
    case Generation::Ending::kSink:
      return "end of the message";
    case Generation::Ending::kLength:
      return "length";
    case Generation::Ending::kContextFull:
      return "context full";
    case Generation::Ending::kStopped:
      return "interrupted";
  }
  return {};
}

// The last token drawn has not been read; whoever goes on reads it with the rest.
void save_session(const Session& s, Engine& engine, const Generation& g) {
  if (s.stored.save.empty()) return;
  std::vector<std::int32_t> ids = s.before;
  ids.insert(ids.end(), s.prompt.ids.begin(), s.prompt.ids.end());
  ids.insert(ids.end(), g.ids.begin(), g.ids.end());
  ids.resize(static_cast<std::size_t>(engine.length(0)));
  engine.store(0, s.stored.save, ids);
  print_line(fmt::format("{}: {} positions stored", s.stored.save, ids.size()));
}

Generation generate(Session& s, Engine& engine, const Generator::Sink& sink) {
  Generator generator(engine, *s.tokenizer, s.notes.log.get());
  if (s.notes.log) s.notes.log->prompt(s.prompt.ids);
  s.stored.load.empty() ? engine.reset(0) : void(engine.load(0, s.stored.load));
  std::uint64_t n_read = 0;
  Generation g = generator.run(
      s.prompt.ids, {engine.config().n_predict, s.config.ignore_eos}, sink,
      [&](const Progress& p) {
        n_read = p.done;
        s.notes.show(p);
      },
      [&] { return stop_asked() || engine.stop_requested(); });
  if (!g.prompt_read) {
    throw Interrupted(fmt::format("stopped on request after {} of {} prompt tokens", n_read,
                                  s.prompt.ids.size()));
  }
  save_session(s, engine, g);
  return g;
}

Generation continue_prompt(Session& s, Engine& engine) {
  Detokenizer text(*s.tokenizer, {.skip_control = !s.config.control_tokens, .raw = false});
  Out out;
  Generation g = generate(s, engine, [&](const Decision& d, bool ends) {
    if (!ends) out(text.push(d.id));
    return true;
  });
  out(text.flush());
  out.end();
  return g;
}

std::string reply_json(const ParsedReply& reply, std::size_t n_prompt, std::size_t n_token) {
  nlohmann::ordered_json j = read_json(write_reply_json(reply));
  j["usage"] = {{"prompt_tokens", n_prompt},
                {"completion_tokens", n_token},
                {"total_tokens", n_prompt + n_token}};
  return write_json(j) + "\n";
}

Generation reply_once(Session& s, Engine& engine, std::string& finish) {
  const bool thinking = s.request->effort != ThinkingEffort::kOff;
  ReplyParser parser(thinking);
  ReplyText text;
  Detokenizer raw(*s.tokenizer, {.skip_control = false, .raw = false});
  Out out;
  const auto show = [&](const std::vector<ReplyEvent>& events) {
    if (s.chat.output == ReplyOutput::kText) out(text.push(events));
  };
  Generation g = generate(s, engine, [&](const Decision& d, bool ends) {
    if (s.chat.output == ReplyOutput::kRaw) out(raw.push(d.id));
    if (!belongs_to_reply(parser, *s.tokenizer, d.id, ends)) return false;
    show(parser.push(*s.tokenizer, d.id));
    return true;
  });
  show(parser.finish(finish_reason(g.ending)));
  if (s.chat.output == ReplyOutput::kRaw) out(raw.flush());
  if (s.chat.output == ReplyOutput::kJson) {
    out(reply_json(parser.reply(), s.prompt.ids.size(), g.ids.size()));
  }
  out.end();
  finish = finish_reason_name(parser.reply().finish_reason);
  if (s.notes.log) s.notes.log->reply(std::ssize(g.ids), finish);
  if (finish == "length" && thinking && parser.reply().answer.empty() &&
      parser.reply().tool_calls.empty()) {
    print_line("note: the reply was cut off inside the thinking, there is no answer: raise " +
               std::string(g.ending == Generation::Ending::kLength ? "--predict" : "--ctx") +
               " or lower --thinking-effort");
  }
  return g;
}

void report(Session& s, const Generation& g, const std::string& reason) {
  const auto n_prompt = static_cast<double>(s.prompt.ids.size());
  // The token that ends a text is none of it.
  const auto n_text =
      std::ssize(g.ids) - (g.ending == Generation::Ending::kEndToken && !s.request ? 1 : 0);
  const double prefill = g.ttft_s > 0 ? n_prompt / g.ttft_s : 0;
  const double tpot_ms = g.n_later() > 0 ? 1e3 * g.later_s / static_cast<double>(g.n_later()) : 0;
  std::string line =
      fmt::format("prompt {} tokens, TTFT {:.1f} ms, prefill {:.1f} tok/s, generated {} tokens",
                  s.prompt.ids.size(), 1e3 * g.ttft_s, prefill, n_text);
  if (g.n_later() > 0)
    line += fmt::format(", TPOT {:.2f} ms, decode {:.1f} tok/s", tpot_ms, 1e3 / tpot_ms);
  s.notes.show.finish();
  print_line(line + ", ended by: " + reason);
  if (!s.notes.log) return;
  RunLog& log = *s.notes.log;
  log.summary("prompt_tokens", n_prompt);
  log.summary("generated_tokens", static_cast<double>(n_text));
  log.summary("ttft_ms", 1e3 * g.ttft_s);
  log.summary("prefill_tok_s", prefill);
  if (g.n_later() > 0) {
    log.summary("tpot_ms", tpot_ms);
    log.summary("decode_tok_s", 1e3 / tpot_ms);
  }
}

struct Ended {
  std::string reason;
  std::string interrupted;  // the line, where a signal was the reason
};

Ended run_once(Session& s, Engine& engine) {
  std::string finish;
  const Generation g = s.request ? reply_once(s, engine, finish) : continue_prompt(s, engine);
  std::string reason = ending_text(s, g);
  if (s.request) reason = finish == reason ? finish : finish + " (" + reason + ")";
  report(s, g, reason);
  if (g.ending != Generation::Ending::kStopped) return {reason, ""};
  return {reason, fmt::format("stopped on request after {} tokens", g.ids.size())};
}

// ---- a conversation -------------------------------------------------------------------------------------------------

Ended converse(Session& s, Engine& engine) {
  InteractiveEnd end;
  {
    // Given back before the ranks speak again, whatever happens: they may wait for one that is gone.
    const std::unique_ptr<Terminal> terminal = std::move(s.terminal);
    end = talk(engine, *s.tokenizer, s.notes.log.get(), *s.request, *terminal,
               {engine.config().n_predict});
  }
  if (s.notes.log) {
    s.notes.log->summary("turns", static_cast<double>(end.n_turn));
    s.notes.log->summary("prompt_tokens", static_cast<double>(end.n_prompt));
    s.notes.log->summary("generated_tokens", static_cast<double>(end.n_token));
  }
  if (end.reason != "interrupted") return {end.reason, ""};
  return {end.reason, fmt::format("stopped on request after {} replies", end.n_turn)};
}

// Rank 0 drives; what it returns all ranks agree on.
std::optional<Fault> drive(Session& s, Engine& engine) {
  Ended ended;
  const std::optional<Fault> fault = guarded(engine, [&] {
    begin_notes(s.notes, engine);
    for (const std::string& w : s.tokenizer->warnings()) print_line("warning: " + w);
    ended = s.terminal ? converse(s, engine) : run_once(s, engine);
    if (s.notes.log) s.notes.log->ranks("ended", engine.reports());
    if (!ended.interrupted.empty()) throw Interrupted(ended.interrupted);
  });
  return close_log(s.notes, fault, ended.reason);
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
  return page_main("k3run", [&] {
    Session s;
    Options options({"k3run", kSynopsis, kAbout, kExamples});
    add_options(options, s);
    parse(options, arguments(argc, argv));
  });
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  if (k3::asks_for_page(k3::arguments(argc, argv))) return k3::print_page(argc, argv);
  return k3::rank_main(
      "k3run", [&](k3::World& world, k3::Comm& comm) { return k3::run(argc, argv, world, comm); });
}
