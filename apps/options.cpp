#include "apps/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include <fmt/core.h>
#include <boost/program_options.hpp>

namespace k3 {
namespace {

namespace po = boost::program_options;

constexpr std::size_t kHelpWidth = 100;
constexpr std::size_t kHelpColumn = 30;

[[noreturn]] void refuse(const std::string& line) { throw std::invalid_argument(line); }

template <class T>
T parse_number(const std::string& option, const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::result_out_of_range) {
    if constexpr (std::is_integral_v<T>) {
      refuse(fmt::format("{} {}: outside {} to {}", option, text, std::numeric_limits<T>::min(),
                         std::numeric_limits<T>::max()));
    }
    refuse(fmt::format("{} {}: too large or too small for a number", option, text));
  }
  if (error != std::errc() || stop != end) {
    const bool whole = std::is_integral_v<T>;
    const bool negative = std::is_unsigned_v<T> && !text.empty() && text[0] == '-';
    refuse(fmt::format("{} {}: not {}", option, text.empty() ? "''" : text,
                       negative ? "a whole number of 0 or more"
                       : whole  ? "a whole number"
                                : "a number"));
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) refuse(fmt::format("{} {}: not a finite number", option, text));
  }
  return value;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : between) + w;
  return out;
}

// Insertions, deletions and replacements that turn a into b.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

// The first word that asks for a page instead of a run; null: none does.
const std::string* find_page(const std::vector<std::string>& args) {
  for (const std::string& a : args) {
    if (a == "--") break;
    if (a == "--help" || a == "-h" || a == "--version") return &a;
  }
  return nullptr;
}

// `text` broken at blanks into lines that start in column kHelpColumn.
void append_wrapped(std::string& out, const std::string& text) {
  std::size_t column = kHelpColumn;
  std::size_t at = 0;
  bool first = true;
  while (at < text.size()) {
    std::size_t end = text.find(' ', at);
    if (end == std::string::npos) end = text.size();
    const std::size_t length = end - at;
    if (!first && column + 1 + length > kHelpWidth) {
      out += "\n" + std::string(kHelpColumn, ' ');
      column = kHelpColumn;
    } else if (!first) {
      out += ' ';
      ++column;
    }
    out.append(text, at, length);
    column += length;
    first = false;
    at = end + 1;
  }
  out += '\n';
}

}  // namespace

const char* const Manual::kExitCodes =
    "  0  done\n"
    "  1  internal error\n"
    "  2  bad input: an option, the model file, the prompt\n"
    "  3  bad environment: launcher, files that cannot be written, memory\n"
    "  4  device failure\n"
    "  5  interrupted: stopped on request after a whole step, what was produced is kept\n";

Options::Options(Manual manual) : manual_(std::move(manual)) { group("Help"); }

void Options::group(std::string title) {
  // "Help" stays last, so that the page ends with it.
  groups_.insert(groups_.empty() ? groups_.end() : groups_.end() - 1, Group{std::move(title), {}});
  if (groups_.size() == 1) {
    groups_[0].items.push_back({"h", "help", "", "Prints this page.", "", {}, false});
    groups_[0].items.push_back(
        {"", "version", "", "Prints version, commit, compiler and libraries.", "", {}, false});
  }
}

Options::Item& Options::add(std::string_view spelling, std::string value, std::string help,
                            std::string preset, std::function<void(const std::string&)> set) {
  Item item;
  const std::size_t comma = spelling.find(',');
  if (comma != std::string_view::npos) item.short_name = spelling.substr(1, comma - 1);
  item.long_name = spelling.substr(comma == std::string_view::npos ? 2 : comma + 3);
  item.value = std::move(value);
  item.help = std::move(help);
  item.preset = std::move(preset);
  item.set = std::move(set);
  if (groups_.size() < 2) group("Options");
  std::vector<Item>& items = groups_[groups_.size() - 2].items;
  items.push_back(std::move(item));
  return items.back();
}

void Options::flag(std::string spelling, bool& to, std::string help) {
  add(spelling, "", std::move(help), "", [&to](const std::string&) { to = true; });
}

void Options::text(std::string spelling, std::string value, std::string& to, std::string help) {
  add(spelling, std::move(value), std::move(help), to, [&to](const std::string& s) { to = s; });
}

template <class T>
void Options::add_number(std::string spelling, std::string value, T& to, std::string help) {
  Item& item = add(spelling, std::move(value), std::move(help), fmt::format("{}", to), {});
  item.set = [&to, name = "--" + item.long_name](const std::string& s) {
    to = parse_number<T>(name, s);
  };
}

void Options::number(std::string spelling, std::string value, int& to, std::string help) {
  add_number(std::move(spelling), std::move(value), to, std::move(help));
}
void Options::number(std::string spelling, std::string value, std::int64_t& to, std::string help) {
  add_number(std::move(spelling), std::move(value), to, std::move(help));
}
void Options::number(std::string spelling, std::string value, std::uint64_t& to, std::string help) {
  add_number(std::move(spelling), std::move(value), to, std::move(help));
}
void Options::number(std::string spelling, std::string value, float& to, std::string help) {
  add_number(std::move(spelling), std::move(value), to, std::move(help));
}
void Options::number(std::string spelling, std::string value, double& to, std::string help) {
  add_number(std::move(spelling), std::move(value), to, std::move(help));
}

void Options::choice(std::string spelling, std::vector<std::string> choices, std::size_t preset,
                     std::function<void(std::size_t)> set, std::string help) {
  Item& item = add(spelling, joined(choices, "|"), std::move(help), choices[preset], {});
  item.set = [choices, set, name = "--" + item.long_name](const std::string& s) {
    const auto found = std::find(choices.begin(), choices.end(), s);
    if (found == choices.end()) {
      refuse(fmt::format("{} {}: not one of {}", name, s, joined(choices, ", ")));
    }
    set(static_cast<std::size_t>(found - choices.begin()));
  };
}

void Options::words(std::string name, std::vector<std::string>& to, std::size_t most) {
  words_name_ = std::move(name);
  words_ = &to;
  most_words_ = most;
}

Options::Item* Options::find(std::string_view long_name) {
  for (Group& g : groups_) {
    for (Item& item : g.items) {
      if (item.long_name == long_name) return &item;
    }
  }
  return nullptr;
}

bool Options::given(std::string_view long_name) const {
  const Item* item = const_cast<Options*>(this)->find(long_name.substr(2));
  if (!item) throw std::logic_error("no such option: " + std::string(long_name));
  return item->given;
}

void Options::unknown(const std::string& spelled) const {
  std::string nearest;
  std::size_t distance = 3;  // further away it is a guess, and a wrong one annoys
  for (const Group& g : groups_) {
    for (const Item& item : g.items) {
      const std::size_t d = edit_distance(spelled, "--" + item.long_name);
      if (d < distance) {
        distance = d;
        nearest = "--" + item.long_name;
      }
    }
  }
  refuse(fmt::format("{}: unknown option{}; {} --help lists all", spelled,
                     nearest.empty() ? "" : ", did you mean " + nearest + "?", manual_.program));
}

Options::Outcome Options::parse(const std::vector<std::string>& args) {
  if (const std::string* page = find_page(args)) {
    return *page == "--version" ? Outcome::kVersion : Outcome::kHelp;
  }
  po::options_description table;
  for (const Group& g : groups_) {
    for (const Item& item : g.items) {
      const std::string names =
          item.short_name.empty() ? item.long_name : item.long_name + "," + item.short_name;
      if (item.value.empty()) {
        table.add_options()(names.c_str(), "");
      } else {
        table.add_options()(names.c_str(), po::value<std::string>(), "");
      }
    }
  }
  // unix_style without allow_guessing: an option's beginning is not the option. No sticky short ones either.
  namespace style = po::command_line_style;
  const int rules = style::allow_long | style::long_allow_adjacent | style::long_allow_next |
                    style::allow_short | style::allow_dash_for_short | style::short_allow_adjacent |
                    style::short_allow_next;
  po::parsed_options parsed(nullptr);
  try {
    parsed = po::command_line_parser(args).options(table).style(rules).run();
  } catch (const po::unknown_option& e) {
    unknown(e.get_option_name());
  } catch (const po::invalid_command_line_syntax& e) {
    using Kind = po::invalid_command_line_syntax;
    const bool extra = e.kind() == Kind::extra_parameter;
    refuse(fmt::format("{}: {}", e.get_option_name(),
                       extra ? "takes no value" : "a value is missing"));
  } catch (const po::error& e) {
    refuse(e.what());
  }
  std::size_t n_words = 0;
  for (const po::option& o : parsed.options) {
    if (o.position_key >= 0) {
      if (n_words == most_words_) {
        refuse(fmt::format("{}: {} takes {}; {} --help", o.value.at(0), manual_.program,
                           most_words_ == 0 ? "options only" : "no more " + words_name_,
                           manual_.program));
      }
      ++n_words;
      words_->push_back(o.value.at(0));
      continue;
    }
    Item* item = find(o.string_key);
    if (!item) unknown(o.original_tokens.empty() ? o.string_key : o.original_tokens[0]);
    if (item->given) refuse(fmt::format("--{}: given twice", item->long_name));
    // "--ctx --temp 1": the next option is not the value. "--prompt=--temp" says that it is.
    if (o.original_tokens.size() == 2 && o.original_tokens[1].rfind("--", 0) == 0 &&
        find(o.original_tokens[1].substr(2))) {
      refuse(fmt::format("--{}: a value is missing", item->long_name));
    }
    item->given = true;
    item->set(o.value.empty() ? "" : o.value[0]);
  }
  return Outcome::kRun;
}

std::string Options::help() const {
  std::string out = "usage:\n";
  std::size_t at = 0;
  while (at < manual_.synopsis.size()) {
    std::size_t end = manual_.synopsis.find('\n', at);
    if (end == std::string::npos) end = manual_.synopsis.size();
    out += "  " + manual_.synopsis.substr(at, end - at) + "\n";
    at = end + 1;
  }
  if (!manual_.about.empty()) out += "\n" + manual_.about;
  for (const Group& g : groups_) {
    if (g.items.empty()) continue;
    out += "\n" + g.title + ":\n";
    for (const Item& item : g.items) {
      std::string left = "  ";
      if (!item.short_name.empty()) left += "-" + item.short_name + ", ";
      left += "--" + item.long_name;
      if (!item.value.empty()) left += " " + item.value;
      if (left.size() + 2 > kHelpColumn) {
        out += left + "\n" + std::string(kHelpColumn, ' ');
      } else {
        out += left + std::string(kHelpColumn - left.size(), ' ');
      }
      const bool told = item.help.find("[default") != std::string::npos;
      append_wrapped(out, told || item.preset.empty()
                              ? item.help
                              : item.help + " [default: " + item.preset + "]");
    }
  }
  if (!manual_.examples.empty()) out += "\nExamples:\n" + manual_.examples;
  return out + "\nExit codes:\n" + manual_.exit_codes;
}

void add_model_options(Options& o, RunConfig& c) {
  o.group("Model");
  o.text("--model", "FILE", c.model,
         "The GGUF file; of a split model any part, the others are found beside it. "
         "[default: the k3-nano.gguf that comes with the program]");
  o.flag("--ignore-split-count", c.ignore_split_count,
         "Accepts a complete set of parts whose split.tensors.count is stale.");
}

void add_layout_options(Options& o, Layout& layout) {
  o.number("--tp", "T", layout.tp,
           "Tensor-parallel ranks: each layer is cut over T ranks. 0: as many as there are ranks / "
           "pp [default: 0]");
  o.number("--pp", "M", layout.pp,
           "Pipeline stages: layers are cut into M runs; tp x pp is the number of ranks.");
  o.choice(
      "--policy", {"full", "experts-only"}, layout.policy == ShardPolicy::kFull ? 0 : 1,
      [&layout](std::size_t i) {
        layout.policy = i == 0 ? ShardPolicy::kFull : ShardPolicy::kExpertsOnly;
      },
      "full: every tensor is cut; experts-only: experts and output head are, the rest is on every "
      "rank and a layer needs one sum only.");
  o.number(
      "--expert-groups", "G", layout.expert_groups,
      "Experts are cut into G groups and the width of each into tp / G bands; G divides tp. 0: "
      "chosen [default: 0]");
  o.flag("--kv-shard", layout.kv_shard,
         "Each of the T ranks keeps 1 / T of the latent cache's rows and attends to them with all "
         "heads: T times as long a context, for two more exchanges an MLA layer.");
}

void add_world_options(Options& o, RunConfig& c) {
  c.layout.tp = 0;
  c.time_limit_s = kAutoTimeLimit;
  o.group("Ranks");
  add_layout_options(o, c.layout);
  o.text("--backend", "NAME", c.backend, "Where the arithmetic runs: cpu or cuda.");
  o.text("--comm", "NAME", c.comm,
         "What data travel over between CUDA ranks: nccl; peer (each other's memory, within one "
         "node); or mpi (through the host).");
  o.choice(
      "--precision", {"exact", "fast"}, static_cast<std::size_t>(c.precision),
      [&c](std::size_t i) { c.precision = static_cast<Precision>(i); },
      "How CUDA ranks round products: exact (f32 throughout), or fast.");
  o.flag(
      "--reproducible", c.reproducible,
      "A sequence's logits have the same bits whatever else is in its steps and however its "
      "prompt is cut. Costs CPU ranks nothing; CUDA ranks take the kernels of many tokens for one, "
      "too (--precision exact), or run tokens one by one, prompts included (fast).");
  o.flag("--share-gpu", c.share_gpu,
         "Let several ranks use one device; their data then go through the host.");
  o.number("--threads", "N", c.threads,
           "Threads per rank. 0: cores of the node / ranks on it [default: 0]");
  o.choice(
      "--bind", {"yes", "no"}, c.bind ? 0 : 1, [&c](std::size_t i) { c.bind = i == 0; },
      "Whether threads of CPU ranks are bound to CPUs, disjoint between ranks. They are not in any "
      "case where the launcher bound nobody and CPUs are left over, or there are too few.");
  o.text("--cpu-kernels", "NAME", c.cpu_kernels,
         "Instructions of CPU ranks: plain, avx2, avx512, or best (of this processor).");
  o.number(
      "--time-limit", "SECONDS", c.time_limit_s,
      "A rank that waits longer than this for the others ends the job and says where it waited; "
      "while models are loaded, one that stands still as long. 0: never. [default: 60 between CPU "
      "ranks, 10 between CUDA ranks]");
}

void add_sequence_options(Options& o, RunConfig& c, const std::string& ctx_default) {
  c.cache_auto = true;
  o.group("Sequence");
  o.number(
      "--ctx", "N", c.n_ctx,
      "Positions kept: prompt and generated tokens together. 0: " + ctx_default + " [default: 0]");
  o.number("--chunk", "N", c.chunk_tok, "Prompt tokens per step of the prefill.");
  o.choice(
      "--cache", {"f32", "f16", "bf16"}, static_cast<std::size_t>(c.cache),
      [&c](std::size_t i) {
        c.cache = static_cast<CacheType>(i);
        c.cache_auto = false;
      },
      "Type of the MLA latent cache. [default: f32 on CPU ranks, f16 on CUDA ranks]");
}

void add_sampling_options(Options& o, RunConfig& c) {
  o.group("Generation");
  o.number("-n,--predict", "N", c.n_predict,
           "Tokens to generate at most; in a chat, where it is not given, what the context has "
           "room for.");
  o.flag("--ignore-eos", c.ignore_eos, "Goes on after tokens that end a text.");
  o.number("--temp", "T", c.sampler.temp, "Temperature. 0: always the likeliest token.");
  o.number("--top-k", "K", c.sampler.top_k, "Keeps the K likeliest tokens. 0: all.");
  o.number("--top-p", "P", c.sampler.top_p,
           "Keeps the likeliest tokens that together reach probability P. 1: all.");
  o.number("--min-p", "P", c.sampler.min_p,
           "Keeps tokens with at least P times the probability of the likeliest. 0: all.");
  o.number(
      "--repetition-penalty", "X", c.sampler.repetition_penalty,
      "Divides positive and multiplies negative logits of tokens seen in prompt or text. 1: off.");
  o.number("--presence-penalty", "X", c.sampler.presence_penalty,
           "Subtracted from logits of tokens already generated. 0: off.");
  o.number("--seed", "N", c.sampler.seed, "Same seed and layout: same text.");
}

void add_log_options(Options& o, RunConfig& c) {
  o.group("Log");
  o.text(
      "--log", "FILE.h5", c.log,
      "Writes an HDF5 log of the run (results/README.md describes it), replacing FILE.h5; a killed "
      "run loses the last 5 s of it at most.");
}

std::vector<std::string> arguments(int argc, char** argv) {
  return std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc);
}

bool asks_for_page(const std::vector<std::string>& args) { return find_page(args) != nullptr; }

std::string shell_quoted(int argc, char** argv) {
  std::string out;
  for (int i = 0; i < argc; ++i) {
    const std::string word = argv[i];
    if (i > 0) out += ' ';
    const char* safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
    if (!word.empty() && word.find_first_not_of(safe) == std::string::npos) {
      out += word;
      continue;
    }
    out += '\'';
    for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    out += '\'';
  }
  return out;
}

}  // namespace k3
