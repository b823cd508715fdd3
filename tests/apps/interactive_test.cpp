// k3run --interactive from a terminal.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "loader/h5.h"
#include "loader/parts.h"
#include "rank/chat_parser.h"
#include "rank/tokenizer.h"
#include "tests/support/on_terminal.h"

using k3::test::OnTerminal;
using Ids = std::vector<std::int32_t>;
namespace fs = std::filesystem;

namespace {

const std::string kRun = K3_BIN_DIR "/k3run";
const std::string kMpirun = K3_SOURCE_DIR "/launch/mpirun.sh";
const std::string kFirst = "My name is Omar. What is the capital of Italy?";
const std::string kSecond = "Tell me a long story.";
const std::string kThird = "What is my name?";
const std::string kCtrlC = "\x03";
const std::string kCtrlD = "\x04";
const std::string kUp = "\x1b[A";

class Scratch {
 public:
  Scratch() : path_(fs::temp_directory_path() / ("k3_interactive_" + std::to_string(getpid()))) {
    fs::create_directories(path_);
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

std::vector<std::string> chat_command(int ranks, const std::vector<std::string>& more = {}) {
  std::vector<std::string> words;
  if (ranks > 1) words = {kMpirun, "-n", std::to_string(ranks)};
  for (const char* word : {kRun.c_str(), "--model", K3_NANO_PATH, "--threads", "1", "--temp", "0",
                           "--thinking-effort", "off", "--interactive"}) {
    words.emplace_back(word);
  }
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// Types a message and gives what is shown up to the line behind the reply.
std::string ask(OnTerminal& t, const std::string& message) {
  t.type(message + "\r");
  const std::string reply = t.until("positions");
  t.until("> ");
  return reply;
}

struct Turn {
  Ids prompt, drawn;
  std::vector<double> logits;
  std::string reason;
};

std::vector<Turn> turns_of(const std::string& log) {
  const k3::h5::Group root = k3::h5::File::open(log).root();
  const Ids prompt = root.open_group("prompt").open("id").read<std::int32_t>();
  const Ids drawn = root.open_group("tokens").open("id").read<std::int32_t>();
  const auto logits = root.open_group("tokens").open("logit").read<double>();
  const k3::h5::Group table = root.open_group("turns");
  const auto n_prompt = table.open("prompt_tokens").read<std::int64_t>();
  const auto n_drawn = table.open("generated_tokens").read<std::int64_t>();
  const auto reasons = table.open("reason").read<std::string>();
  std::vector<Turn> turns;
  auto p = prompt.begin();
  auto d = drawn.begin();
  auto l = logits.begin();
  for (std::size_t i = 0; i < reasons.size(); ++i) {
    turns.push_back({Ids(p, p + n_prompt[i]), Ids(d, d + n_drawn[i]),
                     std::vector<double>(l, l + n_drawn[i]), reasons[i]});
    p += n_prompt[i];
    d += n_drawn[i];
    l += n_drawn[i];
  }
  CHECK(p == prompt.end());
  CHECK(d == drawn.end());
  return turns;
}

std::string answer_of(const Turn& turn) {
  static const k3::Tokenizer tokenizer(
      k3::read_vocab(k3::ModelFile::open(K3_NANO_PATH).metadata(), K3_NANO_PATH));
  k3::ReplyParser parser(false);
  for (const std::int32_t id : turn.drawn) parser.push(tokenizer, id);
  parser.finish(k3::FinishReason::kStop);
  return parser.reply().answer;
}

// The same messages in one run of their own.
Turn one_shot(const Scratch& scratch, const nlohmann::json& messages, const std::string& name) {
  std::ofstream(scratch.file(name + ".json"))
      << nlohmann::json({{"messages", messages}, {"thinking", false}});
  const std::string command = kMpirun + " -n 2 " + kRun +
                              " --threads 1 --temp 0 -n 24 --model " K3_NANO_PATH " --chat " +
                              scratch.file(name + ".json") + " --log " +
                              scratch.file(name + ".h5") + " >/dev/null 2>&1 </dev/null";
  REQUIRE(std::system(command.c_str()) == 0);
  return turns_of(scratch.file(name + ".h5")).at(0);
}

nlohmann::json message(const char* role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

// By how much the logits of two texts differ, as long as they are the same text.
double largest_difference(const Turn& a, const Turn& b) {
  double largest = 0;
  for (std::size_t i = 0; i < std::min(a.drawn.size(), b.drawn.size()); ++i) {
    largest = std::max(largest, std::abs(a.logits[i] - b.logits[i]));
    if (a.drawn[i] != b.drawn[i]) break;
  }
  return largest;
}

}  // namespace

TEST_CASE(
    "over two ranks a second turn remembers the first, Ctrl-C stops its reply, a third works") {
  const Scratch scratch;
  const std::string log = scratch.file("talk.h5");
  OnTerminal t(chat_command(2, {"--log", log}));
  t.until("/help lists the commands");
  t.until("> ");
  // A machine so busy that the reply is over before we have seen its beginning: once more.
  std::size_t first = 0;
  bool stopped = false;
  for (; !stopped && first < 20; first += 2) {
    if (first > 0) {
      t.type("/reset\r");
      t.until("a new conversation");
    }
    CHECK(ask(t, kFirst).find("Rome.") != std::string::npos);
    t.type(kSecond + "\r");
    t.until(kSecond);
    t.until("\n");
    t.more(10);
    t.type(kCtrlC);
    stopped = t.until("\n> ").find("; stopped)") != std::string::npos;
  }
  REQUIRE(stopped);
  first -= 2;
  CHECK(ask(t, kThird).find("Your name is Omar.") != std::string::npos);
  t.type("/quit\r");
  CHECK(t.wait_exit() == 0);
  CHECK(t.is_restored());

  const std::vector<Turn> turns = turns_of(log);
  REQUIRE(turns.size() == first + 3);
  const Turn &one = turns[first], &two = turns[first + 1], &three = turns[first + 2];
  CHECK(one.reason == "stop");
  CHECK(two.reason == "interrupted");
  CHECK(three.reason == "stop");
  CHECK(answer_of(three) == "Your name is Omar.");

  // The proof of memory: the model read and computed what it does for the whole conversation at once.
  const nlohmann::json question = message("user", kSecond);
  const Turn whole = one_shot(
      scratch, {message("user", kFirst), message("assistant", answer_of(one)), question}, "whole");
  const Turn alone = one_shot(scratch, nlohmann::json::array({question}), "alone");
  Ids read = one.prompt;
  read.insert(read.end(), one.drawn.begin(), one.drawn.end());
  read.insert(read.end(), two.prompt.begin(), two.prompt.end());
  CHECK(read == whole.prompt);
  const auto n = static_cast<std::ptrdiff_t>(std::min(two.drawn.size(), whole.drawn.size()));
  REQUIRE(n > 0);
  CHECK(Ids(two.drawn.begin(), two.drawn.begin() + n) ==
        Ids(whole.drawn.begin(), whole.drawn.begin() + n));
  CHECK(largest_difference(two, whole) < 1e-3);
  CHECK(largest_difference(two, alone) > 1e-2);
}

TEST_CASE("history, Ctrl-C on a line and twice on an empty one, and the terminal as it was") {
  OnTerminal t(chat_command(1));
  t.until("> ");
  CHECK(ask(t, "What is the capital of France?").find("Paris.") != std::string::npos);
  t.type("never said" + kCtrlC);
  t.until("^C");
  t.until("> ");
  t.type(kUp + "\r");  // the last line that was said
  CHECK(t.until("positions").find("Paris.") != std::string::npos);
  t.until("> ");
  t.type("/frob\r");
  t.until("/frob: no such command");
  t.until("> ");
  t.type("What is the capital\\\r");
  t.until(". ");
  CHECK(ask(t, "of Japan?").find("Tokyo.") != std::string::npos);
  t.type(kCtrlC);
  t.until("Ctrl-C again");
  t.until("> ");
  CHECK_FALSE(t.is_restored());
  t.type(kCtrlC);
  CHECK(t.wait_exit() == 0);
  CHECK(t.is_restored());
}

TEST_CASE("a full context is one line, and /reset begins anew") {
  OnTerminal t(chat_command(1, {"--ctx", "64"}));
  t.until("> ");
  CHECK(ask(t, "What is the capital of France?").find("Paris.") != std::string::npos);
  const std::string full =
      ask(t, "What is the capital of Japan, and what is the capital of Italy?");
  t.type("/reset\r");
  t.until("a new conversation");
  CHECK(ask(t, "What is the capital of Japan?").find("Tokyo.") != std::string::npos);
  CHECK(full.find("the context is full: ") != std::string::npos);
  t.type(kCtrlD);
  CHECK(t.wait_exit() == 0);
}

TEST_CASE("a message stopped while it was read does not count, and the chat before it is whole") {
  OnTerminal t(chat_command(1, {"--chunk", "1"}));
  t.until("> ");
  CHECK(ask(t, kFirst).find("Rome.") != std::string::npos);
  // Typed ahead: it is there when the first of the prompt's chunks is through.
  t.type("My name is Anna.\r" + kCtrlC);
  t.until("it does not count)");
  t.until("> ");
  CHECK(ask(t, kThird).find("Your name is Omar.") != std::string::npos);
  t.type(kCtrlD);
  CHECK(t.wait_exit() == 0);
}

TEST_CASE("a rank that dies while a line is typed ends the job, the terminal as it was") {
  const Scratch scratch;
  const std::string log = scratch.file("dies.h5");
  OnTerminal t(chat_command(2, {"--log", log}));
  t.until("> ");
  // By its log's path, for other tests may run the same program.
  const auto text_of = [](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  pid_t rank_1 = 0;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string line = text_of(entry.path() / "cmdline");
    if (line.starts_with(kRun) && line.find(log) != std::string::npos &&
        text_of(entry.path() / "environ").find("OMPI_COMM_WORLD_RANK=1") != std::string::npos) {
      rank_1 = std::atoi(entry.path().filename().c_str());
    }
  }
  REQUIRE(rank_1 > 0);
  REQUIRE(kill(rank_1, SIGKILL) == 0);
  CHECK(t.wait_exit() > 0);
  CHECK(t.is_restored());
}

TEST_CASE("a signal while a line is typed ends the job with exit code 5, the terminal as it was") {
  OnTerminal t(chat_command(1));
  t.until("> ");
  t.type("half a li");
  t.until("half a li");
  t.signal(SIGTERM);
  CHECK(t.wait_exit() == 5);
  CHECK(t.is_restored());
  CHECK(t.screen().find("stopped on request after 0 replies") != std::string::npos);
}
