// k3tok: text to token ids and back, with the vocabulary of a model file.
#include <unistd.h>

#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "apps/job.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "loader/parts.h"
#include "rank/detokenizer.h"
#include "rank/tokenizer.h"
#include "rank/utf8.h"

namespace {

using namespace k3;
using nlohmann::ordered_json;

const char* const kSynopsis =
    "k3tok [--model FILE] --prompt TEXT [--control-tokens] [--pieces] [--json]\n"
    "k3tok [--model FILE] --prompt-file FILE ...\n"
    "... | k3tok [--model FILE] ...\n"
    "k3tok [--model FILE] --decode [ID ...] [--json]\n"
    "k3tok [--model FILE] --vocab-info [--json]";

const char* const kAbout =
    "Prints the token ids of a text, on one line with blanks between them: the ids that k3run "
    "feeds\n"
    "to the model for the same prompt. Only the model file's header is read. Nothing is added in\n"
    "front or behind. The text may hold any bytes: one that is not UTF-8 becomes the token of "
    "that\n"
    "byte, and decoding gives the same bytes back.\n"
    "\n"
    "With --pieces each token is on a line: the id, a tab, and its bytes in quotes, where \\n, "
    "\\t,\n"
    "\\\" and \\\\ stand for those characters and \\xNN for a byte that is no part of a "
    "character.\n"
    "Control tokens have 'control' behind another tab.\n"
    "\n"
    "With --json the output is one object: \"ids\"; with --pieces also \"pieces\", of which each "
    "has\n"
    "\"id\", \"control\", and \"text\", or \"hex\" where the bytes are not UTF-8 by themselves.\n"
    "\n"
    "With --decode the words are ids, or with no words the text from --prompt, --prompt-file or\n"
    "standard input is; their bytes are printed as they are, with nothing added, control tokens "
    "as\n"
    "they are spelled. As JSON: \"text\", with U+FFFD for what is not UTF-8, and then \"hex\" as "
    "well.\n";

const char* const kExamples =
    "  k3tok --prompt 'The capital of France is'\n"
    "  k3tok --pieces --control-tokens --prompt '<|open|>message role=\"user\"<|sep|>Hi'\n"
    "  k3tok --model K3-00001-of-00014.gguf --keep-line-end --prompt-file book.txt > book.ids\n"
    "  k3tok --decode 289 330 290\n"
    "  k3tok --decode --prompt-file book.ids > book.txt\n";

struct Request {
  RunConfig run;
  std::string prompt;
  std::string file;
  bool exact = false;
  bool pieces = false;
  bool json = false;
  bool decode = false;
  bool vocab_info = false;
  std::vector<std::string> words;
};

void put(const std::string& bytes) { write_out(bytes); }
void put(const ordered_json& j) { write_out(j.dump() + "\n"); }

bool is_utf8(std::string_view s) {
  while (!s.empty()) {
    const Utf8Scan scan = utf8_scan(s);
    if (scan.kind != Utf8Scan::Kind::kWhole) return false;
    s.remove_prefix(scan.n);
  }
  return true;
}

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(b));
  return out;
}

// On one line, and nothing in it that a terminal would act on.
std::string in_quotes(std::string_view bytes) {
  std::string out = "\"";
  while (!bytes.empty()) {
    const Utf8Scan scan = utf8_scan(bytes);
    const std::string_view part = bytes.substr(0, scan.n);
    const bool harmless = scan.kind == Utf8Scan::Kind::kWhole && scan.code_point >= 0x20 &&
                          (scan.code_point < 0x7f || scan.code_point > 0x9f);
    if (part == "\"" || part == "\\") {
      out += '\\';
      out += part;
    } else if (part == "\n") {
      out += "\\n";
    } else if (part == "\t") {
      out += "\\t";
    } else if (harmless) {
      out += part;
    } else {
      for (const char b : part) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(b));
    }
    bytes.remove_prefix(scan.n);
  }
  return out + "\"";
}

std::string decoded_text(const Tokenizer& t, const std::vector<std::int32_t>& ids) {
  Detokenizer d(t, {false, false});
  std::string text;
  for (const std::int32_t id : ids) text += d.push(id);
  return text + d.flush();
}

// The text, from wherever the options say, and in `where` the name errors call it by.
std::string input_text(const Request& q, const Options& options, std::string& where) {
  if (options.given("--prompt") && options.given("--prompt-file")) {
    throw std::invalid_argument("--prompt and --prompt-file: give one of the two");
  }
  where = "--prompt";
  if (options.given("--prompt") && q.prompt != "-") return q.prompt;
  if (!options.given("--prompt") && !options.given("--prompt-file") && isatty(STDIN_FILENO) == 1) {
    throw std::invalid_argument(
        "--prompt: not given, and standard input is a terminal; k3tok --help");
  }
  const std::string path = options.given("--prompt-file") ? q.file : "-";
  where = path == "-" ? "standard input" : path;
  std::string text = read_text(path);
  if (!q.exact && !text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

void encode(const Request& q, const Options& options, const Tokenizer& t) {
  std::string where;
  const std::string text = input_text(q, options, where);
  const std::vector<std::int32_t> ids =
      t.encode(text, q.run.control_tokens ? ControlText::kRecognised : ControlText::kAsText);
  if (q.json) {
    ordered_json out = {{"ids", ids}};
    if (q.pieces) {
      out["pieces"] = ordered_json::array();
      for (const std::int32_t id : ids) {
        ordered_json piece = {{"id", id}, {"control", t.is_control(id)}};
        const std::string& bytes = t.bytes(id);
        is_utf8(bytes) ? piece["text"] = bytes : piece["hex"] = hex(bytes);
        out["pieces"].push_back(std::move(piece));
      }
    }
    put(out);
    return;
  }
  std::string out;
  for (const std::int32_t id : ids) {
    if (q.pieces) {
      out += fmt::format("{}\t{}{}\n", id, in_quotes(t.bytes(id)),
                         t.is_control(id) ? "\tcontrol" : "");
    } else {
      out += (out.empty() ? "" : " ") + std::to_string(id);
    }
  }
  put(q.pieces ? out : out + "\n");
}

void decode(const Request& q, const Options& options, const Tokenizer& t) {
  std::string where = "--decode";
  std::string list;
  for (const std::string& w : q.words) list += w + " ";
  if (q.words.empty()) list = input_text(q, options, where);
  const std::vector<std::int32_t> ids = parse_ids(list, where);
  check_ids(ids, t.n_vocab(), where);
  const std::string bytes = t.decode(ids);
  if (!q.json) {
    put(bytes);
    return;
  }
  ordered_json out = {{"ids", ids}, {"text", decoded_text(t, ids)}};
  if (!is_utf8(bytes)) out["hex"] = hex(bytes);
  put(out);
}

void vocab_info(const Request& q, const Tokenizer& t) {
  const Vocab& v = t.vocab();
  const std::array<const char*, 6> names = {"",        "normal",       "unknown",
                                            "control", "user-defined", "unused"};
  std::array<std::int64_t, 6> count{};
  for (const std::int32_t type : v.types) ++count[static_cast<std::size_t>(type)];
  ordered_json out = {{"model", v.model}, {"pre", v.pre}, {"tokens", v.tokens.size()}};
  for (std::size_t i = 1; i < names.size(); ++i) out["types"][names[i]] = count[i];
  const auto named = [&](std::int32_t id) {
    return ordered_json{{"id", id}, {"text", decoded_text(t, {id})}};
  };
  const std::array<std::pair<const char*, std::optional<std::int32_t>>, 3> marks = {
      {{"bos", v.bos}, {"eos", v.eos}, {"pad", v.pad}}};
  for (const auto& [name, id] : marks) out[name] = id ? named(*id) : ordered_json(nullptr);
  out["stop"] = ordered_json::array();
  for (const std::int32_t id : t.stop_ids()) out["stop"].push_back(named(id));
  if (q.json) {
    put(out);
    return;
  }
  std::string text =
      fmt::format("model    {}\npre      {}\ntokens   {}\n", v.model, v.pre, v.tokens.size());
  for (std::size_t i = 1; i < names.size(); ++i) {
    if (count[i] > 0) text += fmt::format("  {:<13} {}\n", names[i], count[i]);
  }
  const auto line = [&](const char* name, std::int32_t id) {
    return fmt::format("{:<8} {} {}\n", name, id, in_quotes(t.bytes(id)));
  };
  for (const auto& [name, id] : marks)
    text += id ? line(name, *id) : fmt::format("{:<8} none\n", name);
  for (const std::int32_t id : t.stop_ids()) text += line("stop", id);
  put(text);
}

void check_combination(const Request& q, const Options& options) {
  const bool has_text = options.given("--prompt") || options.given("--prompt-file");
  if (q.decode && q.vocab_info) {
    throw std::invalid_argument("--decode and --vocab-info: give one of the two");
  }
  if (!q.words.empty() && !q.decode) {
    throw std::invalid_argument(
        fmt::format("{}: only --decode takes words; give the text with --prompt", q.words[0]));
  }
  if (!q.words.empty() && has_text) {
    throw std::invalid_argument("--decode: give the ids as words or as a text, not both");
  }
  if (q.pieces && (q.decode || q.vocab_info)) {
    throw std::invalid_argument("--pieces: belongs to encoding");
  }
  if (q.run.control_tokens && (q.decode || q.vocab_info)) {
    throw std::invalid_argument("--control-tokens: belongs to encoding");
  }
  if (has_text && q.vocab_info) throw std::invalid_argument("--vocab-info: takes no text");
}

int run(const Request& q, const Options& options) {
  check_combination(q, options);
  const std::string path = q.run.model.empty() ? default_model() : q.run.model;
  OpenOptions open;
  open.ignore_split_count = q.run.ignore_split_count;
  open.header_only = true;
  const ModelFile file = ModelFile::open(path, open);
  const Tokenizer tokenizer(read_vocab(file.metadata(), path));
  for (const std::string& w : file.warnings()) print_line("k3tok: warning: " + w);
  for (const std::string& w : tokenizer.warnings()) print_line("k3tok: warning: " + w);
  if (q.vocab_info) {
    vocab_info(q, tokenizer);
  } else if (q.decode) {
    decode(q, options, tokenizer);
  } else {
    encode(q, options, tokenizer);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return local_main("k3tok", [&] {
    Request q;
    Options options({"k3tok", kSynopsis, kAbout, kExamples});
    add_model_options(options, q.run);
    options.group("Text");
    options.text("--prompt", "TEXT", q.prompt,
                 "The text. '-' or neither this nor --prompt-file: standard input.");
    options.text("--prompt-file", "FILE", q.file, "Reads the text from FILE.");
    options.flag(
        "--keep-line-end", q.exact,
        "Keeps the line end at the end of a text from a file or from standard input, which "
        "k3run leaves out.");
    options.flag("--control-tokens", q.run.control_tokens,
                 "Reads control tokens such as <|open|> in the text as tokens. Without this they "
                 "are ordinary text.");
    options.group("What to do");
    options.flag("--decode", q.decode, "Ids to text.");
    options.flag(
        "--vocab-info", q.vocab_info,
        "Prints what the file's tokenizer is: kinds of tokens, bos, eos, pad, stop tokens.");
    options.group("Output");
    options.flag("--pieces", q.pieces, "A line per token: id and bytes.");
    options.flag("--json", q.json, "One JSON object.");
    options.words("ids", q.words, std::numeric_limits<std::size_t>::max());
    switch (options.parse(arguments(argc, argv))) {
      case Options::Outcome::kHelp:
        put(options.help());
        return 0;
      case Options::Outcome::kVersion:
        put(full_version_text("k3tok") + "\n");
        return 0;
      case Options::Outcome::kRun:
        break;
    }
    return run(q, options);
  });
}
