// argv → RunConfig, and the --help of every program. The only user of Boost.Program_options.
//
// Every option has one spelling in every program (the groups below are shared). An unknown option, a malformed number or
// an option given twice throws std::invalid_argument with one line; long options are never guessed from their beginning.
// Ranges of RunConfig's fields are checked by check() in rank/run_config, which parse() does not call.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "rank/run_config.h"

namespace k3 {

// The manual page around the table of options. Lines are printed as they are.
struct Manual {
  std::string program;   // "k3run"; with a command: "k3eval logits"
  std::string synopsis;  // "k3run [--model FILE] ..."; more lines for more forms
  std::string about;     // what it does, what it reads, what it prints
  std::string examples;
  std::string exit_codes = kExitCodes;

  static const char* const kExitCodes;
};

class Options {
 public:
  enum class Outcome { kRun, kHelp, kVersion };

  // --help and --version are there from the start.
  explicit Options(Manual manual);

  // Starts a titled group in --help; options belong to the last one.
  void group(std::string title);

  // `spelling`: "--ctx", or "-n,--predict". The target is set by parse() and holds the default until then; the default is
  // printed in --help unless the text says in words what happens ("[default: ...]").
  void flag(std::string spelling, bool& to, std::string help);
  void text(std::string spelling, std::string value, std::string& to, std::string help);
  void number(std::string spelling, std::string value, int& to, std::string help);
  void number(std::string spelling, std::string value, std::int64_t& to, std::string help);
  void number(std::string spelling, std::string value, std::uint64_t& to, std::string help);
  void number(std::string spelling, std::string value, float& to, std::string help);
  void number(std::string spelling, std::string value, double& to, std::string help);
  // One of `choices`; `set` is called with its index.
  void choice(std::string spelling, std::vector<std::string> choices, std::size_t preset,
              std::function<void(std::size_t)> set, std::string help);
  // Words that are not options: at most `most` of them; without a call to this, none.
  void words(std::string name, std::vector<std::string>& to, std::size_t most);

  // Throws std::invalid_argument. For kHelp and kVersion nothing else on the line is looked at.
  Outcome parse(const std::vector<std::string>& args);
  bool given(std::string_view long_name) const;  // "--prompt"

  std::string help() const;
  const Manual& manual() const { return manual_; }

 private:
  struct Item {
    std::string short_name;  // "n" or empty
    std::string long_name;   // "predict"
    std::string value;       // "N"; empty: a flag
    std::string help;
    std::string preset;
    std::function<void(const std::string&)> set;
    bool given = false;
  };
  struct Group {
    std::string title;
    std::vector<Item> items;
  };
  Item& add(std::string_view spelling, std::string value, std::string help, std::string preset,
            std::function<void(const std::string&)> set);
  Item* find(std::string_view long_name);
  [[noreturn]] void unknown(const std::string& spelled) const;
  template <class T>
  void add_number(std::string spelling, std::string value, T& to, std::string help);

  Manual manual_;
  std::vector<Group> groups_;
  std::vector<std::string>* words_ = nullptr;
  std::size_t most_words_ = 0;
  std::string words_name_;
};

// The shared groups. Each binds fields of `config`, which must outlive the parser.
void add_model_options(Options& options, RunConfig& config);  // --model --ignore-split-count
void add_world_options(
    Options& options,
    RunConfig& config);  // --tp --pp --policy --expert-groups --backend --threads ...
void add_layout_options(Options& options,
                        Layout& layout);  // of these, --tp --pp --policy --expert-groups
// --ctx --chunk --cache. `ctx_default`: what --ctx 0 comes to, for --help.
void add_sequence_options(Options& options, RunConfig& config,
                          const std::string& ctx_default = "the model's limit, at most 4096");
void add_sampling_options(Options& options,
                          RunConfig& config);               // -n --temp --top-k --top-p --min-p ...
void add_log_options(Options& options, RunConfig& config);  // --log

// argv[0] left out.
std::vector<std::string> arguments(int argc, char** argv);

// --help or --version is on the line: Options::parse() looks at nothing else then.
bool asks_for_page(const std::vector<std::string>& args);

// The command line as one string that a shell would read back, for the log.
std::string shell_quoted(int argc, char** argv);

}  // namespace k3
