// The parts of k3batch: lines in, requests, answers, lines out.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "apps/batch_answer.h"
#include "apps/batch_lines.h"
#include "apps/batch_output.h"
#include "apps/batch_request.h"
#include "apps/batch_settings.h"
#include "apps/batch_stats.h"
#include "loader/parts.h"
#include "rank/json_text.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "k3batch.XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path(name);
  }
  std::string path(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

std::string text_of(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

std::vector<InputLine> lines_of(const std::string& path, std::size_t limit = 1 << 20) {
  LineReader reader(path, limit);
  std::vector<InputLine> out;
  for (InputLine line; reader.next(line, 0) == LineReader::Outcome::kLine;) out.push_back(line);
  CHECK(reader.bytes_read() == reader.bytes_total());
  return out;
}

const Tokenizer& nano() {
  static const Tokenizer tokenizer = [] {
    const ModelFile file = ModelFile::open(K3_NANO_PATH, {});
    return Tokenizer(read_vocab(file.metadata(), K3_NANO_PATH));
  }();
  return tokenizer;
}

BatchDefaults defaults() {
  BatchDefaults d;
  d.n_ctx = 100;
  d.n_vocab = 2048;
  return d;
}

BatchRequest request(const std::string& text, const BatchDefaults& d = defaults()) {
  return read_batch_request({1, text, false, line_hash(text)}, d, nano());
}

TEST_CASE("lines are numbered as an editor does, and what is blank is passed over") {
  const Folder folder;
  const auto lines = lines_of(folder.file("in",
                                          "\xef\xbb\xbf"
                                          "one\r\n\n  \t\r\ntwo\n\nthree"));
  REQUIRE(lines.size() == 3);
  CHECK(lines[0].text == "one");
  CHECK(lines[1].text == "two");
  CHECK(lines[1].number == 4);
  CHECK(lines[2].text == "three");
  CHECK(lines[2].number == 6);
  CHECK(lines[2].hash == line_hash("three"));
}

TEST_CASE("a line past the limit is one line, told apart by all of it") {
  const Folder folder;
  const std::string a = std::string(3'000'000, 'x') + "a", b = std::string(3'000'000, 'x') + "b";
  const auto lines = lines_of(folder.file("in", "one\n" + a + "\n" + b + "\nlast\n"), 1'000'000);
  REQUIRE(lines.size() == 4);
  CHECK(lines[1].too_long);
  CHECK(lines[1].text.size() == 256);
  CHECK(lines[1].number == 2);
  CHECK(lines[1].hash != lines[2].hash);
  CHECK(lines[3].text == "last");
  CHECK(lines[3].number == 4);
  CHECK_THROWS_AS(LineReader(folder.path("none")), std::invalid_argument);
  CHECK_THROWS_AS(LineReader(folder.path("")), std::invalid_argument);
}

TEST_CASE("what a line says goes before the options, and nothing of it is passed over") {
  const BatchRequest r =
      request(R"({"custom_id": "q", "prompt": "a", "max_tokens": 3, "temperature": 0.5, "top_k": 4,
                  "seed": 18446744073709551615, "stop": ["x", "yz"], "logprobs": true, "user": "u"})");
  REQUIRE_FALSE(r.error);
  CHECK(r.id == "q");
  CHECK(r.n_predict == 3);
  CHECK(r.sampler.temp == 0.5f);
  CHECK(r.sampler.top_k == 4);
  CHECK(r.sampler.seed == ~std::uint64_t{0});
  CHECK(r.stop == std::vector<std::string>{"x", "yz"});
  CHECK(r.logprobs);
  BatchDefaults d = defaults();
  d.sampler.temp = 0.25f;
  d.n_predict = 7;
  CHECK(request(R"({"prompt": "a"})", d).sampler.temp == 0.25f);
  CHECK(request(R"({"prompt": "a"})", d).n_predict == 7);
}

TEST_CASE("a line that is no request says why, and keeps its id where one can be read") {
  const auto code = [](const std::string& text) {
    const BatchRequest r = request(text);
    return r.error ? r.error->code : "none";
  };
  CHECK(code(R"({"prompt": "a"})") == "none");
  CHECK(code("{") == "bad_json");
  CHECK(code("{\"prompt\": \"\xff\"}") == "bad_json");
  CHECK(code("[]") == "not_an_object");
  CHECK(code("{}") == "bad_request");
  CHECK(code(R"({"prompt": "a", "messages": [{"role": "user", "content": "a"}]})") ==
        "bad_request");
  CHECK(code(R"({"prompt": "a", "max_token": 1})") == "bad_request");
  CHECK(code(R"({"prompt": "a", "top_k": 3000000000})") == "bad_request");
  CHECK(code(R"({"prompt": "a", "temperature": "0"})") == "bad_request");
  CHECK(code(R"({"prompt": "a", "stop": ["a", 1]})") == "bad_request");
  std::string words;
  for (int i = 0; i < 200; ++i) words += "word ";
  CHECK(code(R"({"prompt": ")" + words + R"("})") == "prompt_too_long");
  const BatchRequest r = request(R"({"id": 12, "prompt": 5})");
  REQUIRE(r.error);
  CHECK(r.id == 12);
  CHECK(r.error->message == "prompt: a number, expected a string");
  const auto json = read_json(error_line(r));
  CHECK(json["id"] == 12);
  CHECK(json["error"]["code"] == "bad_request");
  CHECK_FALSE(json.contains("text"));
}

TEST_CASE("lines of hosted batch services are read, and nothing in them is passed over either") {
  const BatchRequest r = request(
      R"({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "ab", "max_tokens": 2}})");
  REQUIRE_FALSE(r.error);
  CHECK(r.id == "c");
  CHECK(r.n_predict == 2);
  CHECK(r.ids == request(R"({"prompt": "ab"})").ids);
  const std::string chat =
      R"("messages": [{"role": "user", "content": "Hello"}], "temperature": 0)";
  const BatchRequest wrapped = request(R"({"custom_id": 1, "body": {)" + chat + "}}");
  REQUIRE_FALSE(wrapped.error);
  CHECK(wrapped.is_chat);
  CHECK(wrapped.ids == request("{" + chat + "}").ids);
  for (const char* bad :
       {R"({"custom_id": 1, "body": 3})",
        R"({"custom_id": 1, "prompt": "a", "body": {"prompt": "a"}})",
        R"({"custom_id": 1, "url": "/v1/embeddings", "body": {"prompt": "a"}})",
        R"({"custom_id": 1, "method": "GET", "body": {"prompt": "a"}})",
        R"({"body": {"id": 3, "prompt": "a"}})", R"({"custom_id": 1, "body": {"promt": "a"}})"}) {
    CAPTURE(bad);
    CHECK(request(bad).error.has_value());
  }
}

// An answer fed with the tokens of `text`.
std::string answer_line(const BatchRequest& r, const std::string& text) {
  BatchAnswer answer(r, nano());
  Decision d;
  bool open = true;
  for (const std::int32_t id : nano().encode(text, ControlText::kAsText)) {
    REQUIRE(open);
    d.id = id;
    d.logprob = -0.5;
    open = answer.push(d);
    if (!open) break;
  }
  if (open) answer.cut_off();
  return answer.line({});
}

TEST_CASE("a stop string ends the text before it, also where it comes in pieces") {
  const auto of = [](const std::string& stop, const std::string& text) {
    return read_json(
        answer_line(request(R"({"prompt": "a", "logprobs": true, "stop": )" + stop + "}"), text));
  };
  const auto a = of(R"(["of Senegal", "zzz"])", "The capital of Senegal is Dakar.");
  CHECK(a["text"] == "The capital ");
  CHECK(a["finish_reason"] == "stop");
  CHECK(a["stop"] == "of Senegal");
  CHECK(a["ids"].size() == a["logprobs"].size());
  // The first in the text wins, not the first of the list.
  CHECK(of(R"(["Dakar", "capital"])", "The capital of Senegal is Dakar.")["text"] == "The ");
  const auto b = of(R"("Paris")", "The capital of Senegal is Dakar.");
  CHECK(b["text"] == "The capital of Senegal is Dakar.");
  CHECK(b["finish_reason"] == "length");
  CHECK_FALSE(b.contains("stop"));
}

TEST_CASE("max_tokens ends an answer, with that many ids") {
  const auto a =
      read_json(answer_line(request(R"({"prompt": "a", "max_tokens": 3})"), "one two three four"));
  CHECK(a["ids"].size() == 3);
  CHECK(a["usage"]["completion_tokens"] == 3);
  CHECK(a["finish_reason"] == "length");
}

std::string output_line(int line, const std::string& more = "") {
  return R"({"id": null, "line": )" + std::to_string(line) + R"(, "line_hash": "00000000000000)" +
         std::to_string(10 + line) + R"(", "text": "")" + more + "}\n";
}

TEST_CASE("an output resumes where it broke off, and cuts the line that did") {
  const Folder folder;
  const std::string whole = output_line(3) + output_line(1, R"(, "error": {})");
  const std::string path = folder.file("out", whole + output_line(2).substr(0, 30));
  CHECK_THROWS_WITH_AS(BatchOutput(path, false), doctest::Contains("--resume"),
                       std::invalid_argument);
  CHECK(text_of(path) == whole + output_line(2).substr(0, 30));
  {
    BatchOutput out(path, true);
    CHECK(out.bytes_cut() == 30);
    CHECK(out.done().count() == 2);
    CHECK(out.n_failed_before() == 1);
    CHECK(out.done().has(1));
    CHECK_FALSE(out.done().has(2));
    CHECK(out.done().hash(3) == 0x13);
    CHECK_THROWS_WITH_AS(BatchOutput(path, true), doctest::Contains("another job is writing it"),
                         std::invalid_argument);
    out.add("{}");
    CHECK(text_of(path) == whole);
    out.commit();
  }
  CHECK(text_of(path) == whole + "{}\n");
}

TEST_CASE("an output that k3batch did not write is refused, with the line, and left alone") {
  const Folder folder;
  const auto refused = [&](const std::string& text, const char* why) {
    const std::string path = folder.file("out", text);
    CHECK_THROWS_WITH_AS(BatchOutput(path, true), doctest::Contains(why), std::invalid_argument);
    CHECK(text_of(path) == text);
  };
  refused(output_line(1) + "hello\nhalf", "line 2: is not of a k3batch output");
  refused(output_line(1) + output_line(1), "line 2: input line 1 is answered twice");
  refused(R"({"line": 99999999999999, "line_hash": "1"})"
          "\n",
          "line or line_hash");
}

TEST_CASE("settings that decide answers are compared, others are not") {
  const Folder folder;
  RunConfig c;
  const BatchDefaults d = defaults();
  const std::string path = folder.path("settings.json");
  keep_settings(path, batch_settings(c, d, "f"), false);
  c.threads = 7;
  c.n_slot = 3;
  c.layout.tp = 2;
  CHECK_NOTHROW(keep_settings(path, batch_settings(c, d, "f"), true));
  c.sampler.top_k = 3;
  CHECK_THROWS_WITH_AS(keep_settings(path, batch_settings(c, d, "f"), true),
                       doctest::Contains("top-k is '3'"), std::invalid_argument);
  c.sampler.top_k = 0;
  CHECK_THROWS_WITH_AS(keep_settings(path, batch_settings(c, d, "g"), true),
                       doctest::Contains("fingerprint"), std::invalid_argument);
  c.reproducible = true;
  const std::string exact = folder.path("exact.json");
  keep_settings(exact, batch_settings(c, d, "f"), false);
  c.layout.tp = 4;
  CHECK_THROWS_WITH_AS(keep_settings(exact, batch_settings(c, d, "f"), true),
                       doctest::Contains("tp is '4'"), std::invalid_argument);
}

TEST_CASE("percentiles are right to half a percent, whatever the number of values") {
  Percentiles p;
  CHECK(p.at(0.5) == 0);
  for (int i = 1; i <= 100000; ++i) p.add(1e-3 * i);
  CHECK(p.at(0.5) == doctest::Approx(50).epsilon(0.006));
  CHECK(p.at(0.99) == doctest::Approx(99).epsilon(0.006));
  CHECK(p.at(1) == doctest::Approx(100).epsilon(0.006));
  CHECK(p.mean() == doctest::Approx(50.0005));
  Percentiles extremes;
  extremes.add(0);
  extremes.add(1e30);
  CHECK(extremes.at(0.5) < 1e-6);
  CHECK(extremes.at(1) > 1e8);
}

}  // namespace
}  // namespace k3
