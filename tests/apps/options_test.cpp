#include "apps/options.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

using k3::Options;
using k3::RunConfig;

struct Parsed {
  RunConfig config;
  std::string prompt;
  std::vector<std::string> words;
  Options options{{"k3x", "k3x [options]", "About.\n", ""}};

  Parsed() {
    add_model_options(options, config);
    options.group("Prompt");
    options.text("--prompt", "TEXT", prompt, "The text.");
    add_sampling_options(options, config);
    add_sequence_options(options, config);
    add_world_options(options, config);
    add_log_options(options, config);
  }
  Parsed(const Parsed&) = delete;
};

void refused(const std::vector<std::string>& args, const std::string& line) {
  Parsed p;
  CHECK_THROWS_WITH_AS(p.options.parse(args), line.c_str(), std::invalid_argument);
}

TEST_CASE("options reach their fields in every form of spelling") {
  Parsed p;
  CHECK(p.options.parse({"--model=a b.gguf", "-n", "5", "--temp", "0.25", "--seed",
                         "18446744073709551615", "--tp", "2", "--policy", "experts-only",
                         "--cache=f16", "--ignore-eos", "--prompt", "x y"}) ==
        Options::Outcome::kRun);
  CHECK(p.config.model == "a b.gguf");
  CHECK(p.config.n_predict == 5);
  CHECK(p.config.sampler.temp == 0.25f);
  CHECK(p.config.sampler.seed == 18446744073709551615u);
  CHECK(p.config.layout.tp == 2);
  CHECK(p.config.layout.policy == k3::ShardPolicy::kExpertsOnly);
  CHECK(p.config.cache == k3::CacheType::kF16);
  CHECK(p.config.ignore_eos);
  CHECK(p.prompt == "x y");
  CHECK(p.options.given("--prompt"));
  CHECK_FALSE(p.options.given("--log"));
}

TEST_CASE("without --tp all ranks share each layer") {
  Parsed p;
  p.options.parse({});
  CHECK(p.config.layout.tp == 0);
}

TEST_CASE("values that look like options or numbers below zero are values") {
  Parsed p;
  p.options.parse({"--presence-penalty", "-1.5", "--prompt", "-"});
  CHECK(p.config.sampler.presence_penalty == -1.5f);
  CHECK(p.prompt == "-");
  Parsed q;
  q.options.parse({"--prompt=--help me"});
  CHECK(q.prompt == "--help me");
  Parsed r;
  r.options.parse({"--prompt", ""});
  CHECK(r.prompt.empty());
  CHECK(r.options.given("--prompt"));
}

TEST_CASE("the beginning of a long option is not the option") {
  refused({"--prom", "x"}, "--prom: unknown option, did you mean --prompt?; k3x --help lists all");
  refused({"--ignore-e"},
          "--ignore-e: unknown option, did you mean --ignore-eos?; k3x --help lists all");
  refused({"--t", "1"}, "--t: unknown option, did you mean --tp?; k3x --help lists all");
}

TEST_CASE("an unknown option is named, with the nearest known one where one is near") {
  refused({"--prompd", "x"},
          "--prompd: unknown option, did you mean --prompt?; k3x --help lists all");
  refused({"--frobnicate"}, "--frobnicate: unknown option; k3x --help lists all");
  refused({"-z", "1"}, "-z: unknown option; k3x --help lists all");
}

TEST_CASE("malformed numbers are refused whole") {
  refused({"--ctx", "abc"}, "--ctx abc: not a whole number");
  refused({"--ctx", "12x"}, "--ctx 12x: not a whole number");
  refused({"--ctx", "1e3"}, "--ctx 1e3: not a whole number");
  refused({"--ctx", ""}, "--ctx '': not a whole number");
  refused({"--ctx", " 5"}, "--ctx  5: not a whole number");
  refused({"--ctx", "99999999999999999999"},
          "--ctx 99999999999999999999: outside -9223372036854775808 to 9223372036854775807");
  refused({"--seed", "-1"}, "--seed -1: not a whole number of 0 or more");
  refused({"--temp", "warm"}, "--temp warm: not a number");
  refused({"--temp", "nan"}, "--temp nan: not a finite number");
  refused({"--temp", "1e999"}, "--temp 1e999: too large or too small for a number");
  refused({"-n", "x"}, "--predict x: not a whole number");
}

TEST_CASE("a missing value, a value too many, a word and an option given twice are refused") {
  refused({"--ctx"}, "--ctx: a value is missing");
  refused({"--ctx", "--temp", "1"}, "--ctx: a value is missing");
  refused({"--ignore-eos=yes"}, "--ignore-eos: takes no value");
  refused({"hello"}, "hello: k3x takes options only; k3x --help");
  refused({"--ctx", "1", "--ctx", "2"}, "--ctx: given twice");
  refused({"--policy", "half"}, "--policy half: not one of full, experts-only");
}

TEST_CASE("words are taken where a program has them, up to their number") {
  Parsed p;
  p.options.words("words", p.words, 1);
  p.options.parse({"one"});
  CHECK(p.words == std::vector<std::string>{"one"});
  Parsed q;
  q.options.words("words", q.words, 1);
  CHECK_THROWS_WITH_AS(q.options.parse({"one", "two"}), "two: k3x takes no more words; k3x --help",
                       std::invalid_argument);
}

TEST_CASE("--help and --version win over whatever else is wrong") {
  Parsed p;
  CHECK(p.options.parse({"--frobnicate", "--help"}) == Options::Outcome::kHelp);
  CHECK(p.options.parse({"--ctx", "x", "--version"}) == Options::Outcome::kVersion);
}

TEST_CASE("the help page names every option with its default, and its lines fit a terminal") {
  const Parsed p;
  const std::string page = p.options.help();
  for (const char* part :
       {"usage:\n  k3x [options]", "About.", "-n, --predict N", "[default: 128]", "--temp T",
        "[default: 0.95]", "full|experts-only", "Exit codes:", "--version"}) {
    CHECK_MESSAGE(page.find(part) != std::string::npos, part);
  }
  std::size_t at = 0;
  while (at < page.size()) {
    const std::size_t end = page.find('\n', at);
    CHECK_MESSAGE(end - at <= 100, page.substr(at, end - at));
    at = end + 1;
  }
}

TEST_CASE("a command line is quoted so that a shell reads the same words") {
  std::string a = "k3run", b = "--prompt", c = "it's $5", d = "";
  char* argv[] = {a.data(), b.data(), c.data(), d.data()};
  CHECK(k3::shell_quoted(4, argv) == "k3run --prompt 'it'\\''s $5' ''");
}

}  // namespace
