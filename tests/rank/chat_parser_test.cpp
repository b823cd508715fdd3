#include "rank/chat_parser.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "rank/chat_json.h"

using namespace k3;
using nlohmann::ordered_json;
using Kind = ReplyEvent::Kind;

namespace {

const std::array<std::string, 4> kMarkers = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};

struct Run {
  ParsedReply reply;
  std::vector<ReplyEvent> events;
};

void append(std::vector<ReplyEvent>& all, const std::vector<ReplyEvent>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// The stream as text, cut before the given bytes.
Run run_text(const std::string& stream, const std::vector<std::size_t>& cuts, bool thinking = true,
             FinishReason why = FinishReason::kStop) {
  ReplyParser parser(thinking);
  Run run;
  std::size_t begin = 0;
  for (const std::size_t cut : cuts) {
    append(run.events, parser.push_text(stream.substr(begin, cut - begin)));
    begin = cut;
  }
  append(run.events, parser.push_text(stream.substr(begin)));
  append(run.events, parser.finish(why));
  run.reply = parser.reply();
  return run;
}

struct Token {
  std::string bytes;
  bool is_control;
};

// The markers as control tokens, the text between them as tokens of `n` bytes.
std::vector<Token> tokens_of(const std::string& stream, std::size_t n = 3) {
  std::vector<Token> out;
  for (std::size_t at = 0; at < stream.size();) {
    const auto found = std::find_if(kMarkers.begin(), kMarkers.end(), [&](const auto& m) {
      return stream.compare(at, m.size(), m) == 0;
    });
    if (found != kMarkers.end()) {
      out.push_back({*found, true});
      at += found->size();
      continue;
    }
    if (out.empty() || out.back().is_control || out.back().bytes.size() == n) {
      out.push_back({"", false});
    }
    out.back().bytes += stream[at++];
  }
  return out;
}

Run run_tokens(const std::vector<Token>& tokens, bool thinking = true,
               FinishReason why = FinishReason::kStop) {
  ReplyParser parser(thinking);
  Run run;
  for (const auto& t : tokens) append(run.events, parser.push(t.bytes, t.is_control));
  append(run.events, parser.finish(why));
  run.reply = parser.reply();
  return run;
}

std::string describe(const ParsedReply& r) {
  std::ostringstream out;
  out << "reasoning [" << r.reasoning << "] answer [" << r.answer << "] "
      << finish_reason_name(r.finish_reason) << " raw [" << r.raw << "]";
  for (const auto& c : r.tool_calls) {
    out << "\ncall " << c.index << " [" << c.name << "] [" << c.arguments << "] "
        << (c.is_json ? "json" : "not json") << (c.complete ? "" : ", broken off") << " raw ["
        << c.raw << "] block [" << c.json_block.value_or("-") << "]";
    for (const auto& a : c.typed) out << " " << a.key << ":" << a.type << "=" << a.value;
  }
  return out.str();
}

// What one gets who only listens.
std::string heard(const std::vector<ReplyEvent>& events) {
  std::string reasoning, answer, rest;
  std::vector<std::string> arguments;
  for (const auto& e : events) {
    switch (e.kind) {
      case Kind::kReasoning:
        reasoning += e.text;
        break;
      case Kind::kAnswer:
        answer += e.text;
        break;
      case Kind::kCallStart:
        CHECK(e.call == arguments.size());
        arguments.push_back(e.text + "|");
        break;
      case Kind::kCallArguments:
        REQUIRE(e.call + 1 == arguments.size());
        arguments.back() += e.text;
        break;
      case Kind::kCallEnd:
        REQUIRE(e.call + 1 == arguments.size());
        arguments.back() += "|end";
        break;
      case Kind::kFinish:
        rest += " " + e.text;
        break;
    }
  }
  std::string out = "[" + reasoning + "][" + answer + "]" + rest;
  for (const auto& a : arguments) out += "\n" + a;
  return out;
}

std::string said(const ParsedReply& r) {
  std::string out =
      "[" + r.reasoning + "][" + r.answer + "] " + std::string(finish_reason_name(r.finish_reason));
  for (const auto& c : r.tool_calls) {
    out += "\n" + c.name + "|" + c.arguments + (c.complete ? "|end" : "");
  }
  return out;
}

void check_heard(const Run& run) {
  CHECK(heard(run.events) == said(run.reply));
  REQUIRE(!run.events.empty());
  CHECK(run.events.back().kind == Kind::kFinish);
}

struct Stream {
  std::string name;
  std::string text;
  std::string reasoning, answer;
  std::vector<std::string> calls = {};  // name and arguments
};

const std::string kThinkEnd = "<|close|>think<|sep|>";
const std::string kResponse = "<|open|>response<|sep|>";
const std::string kResponseEnd = "<|close|>response<|sep|>";
const std::string kTools = "<|open|>tools<|sep|>";
const std::string kEnd = "<|close|>message<|sep|><|end_of_msg|>";
const std::string kCall =
    "<|open|>call tool=\"get_time\" index=\"1\"<|sep|><|open|>argument key=\"tz\" "
    "type=\"string\"<|sep|>Asia/\"Tokyo\"\n<|close|>argument<|sep|><|open|>argument key=\"n\" "
    "type=\"number\"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>";
const std::string kCallArguments = R"({"tz": "Asia/\"Tokyo\"\n", "n": 2})";
const std::string kRawCall =
    "<|open|>call tool=\"f&amp;&quot;\" index=\"2\"<|sep|><|open|>json "
    "type=\"object\"<|sep|>{\"tz\":"
    "<|close|>json<|sep|><|close|>call<|sep|>";

std::vector<Stream> streams() {
  const std::string time = "get_time " + kCallArguments;
  const std::string raw = "f&\" {\"tz\":";
  const std::string opened = "Hm, é." + kThinkEnd + kResponse + "Four: 4 < 5 <| 東";
  const std::string said = "Four: 4 < 5 <| 東";
  return {
      {"as meant", opened + kResponseEnd + kEnd, "Hm, é.", said},
      {"calls",
       opened + kResponseEnd + kTools + kCall + kRawCall + "<|close|>tools<|sep|>" + kEnd,
       "Hm, é.",
       said,
       {time, raw}},
      {"think never closed before the response", "Hm." + kResponse + "4" + kResponseEnd + kEnd,
       "Hm.", "4"},
      {"think never closed before the tools",
       "Hm." + kTools + kCall + "<|close|>tools<|sep|>" + kEnd,
       "Hm.",
       "",
       {time}},
      {"message closed without the response", opened + kEnd, "Hm, é.", said},
      {"unnamed closes",
       "Hm.<|close|><|sep|>" + kResponse + "4<|close|><|sep|>" + kTools +
           "<|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"a\" "
           "type=\"string\"<|sep|>x<|close|><|sep|><|close|><|sep|><|close|><|sep|><|close|><|sep|>"
           "<|end_of_msg|>",
       "Hm.",
       "4",
       {"f {\"a\": \"x\"}"}},
      {"a close without its separator at the end", opened + kResponseEnd + "<|close|>message",
       "Hm, é.", said},
      {"closes without separators",
       "Hm.<|close|>think" + kResponse + "4<|close|>response<|close|>message<|end_of_msg|>", "Hm.",
       "4"},
      {"a close without its separator ends the message",
       opened + "<|close|>message<|open|>response<|sep|>more<|end_of_msg|>", "Hm, é.", said},
      {"an unnamed close, and the answer at once", "Hm.<|close|><|sep|>It is 4." + kEnd, "Hm.",
       "It is 4."},
      {"a response after calls that were never closed",
       "Hm." + kTools + kCall.substr(0, kCall.size() - 20) + kResponse + "4" + kEnd,
       "Hm.",
       "4",
       {time}},
      {"several calls, the calls never closed",
       "Hm." + kThinkEnd + kTools + kCall.substr(0, kCall.size() - 20) + kCall + kEnd,
       "Hm.",
       "",
       {time, time}},
      {"an argument never closed",
       "Hm." + kThinkEnd + kTools +
           "<|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"a\" "
           "type=\"string\"<|sep|>x<|open|>argument key=\"b\" type=\"boolean\"<|sep|>true"
           "<|close|>tools<|sep|>" +
           kEnd,
       "Hm.",
       "",
       {"f {\"a\": \"x\", \"b\": true}"}},
      {"payloads that are not JSON",
       "Hm." + kThinkEnd + kTools +
           "<|open|>call tool=\"f\" index=\"1\"<|sep|>"
           "<|open|>argument key=\"a\" type=\"object\"<|sep|>{\"x\": <|close|>argument<|sep|>"
           "<|open|>argument key=\"b\" type=\"boolean\"<|sep|>True<|close|>argument<|sep|>"
           "<|open|>argument key=\"c\" type=\"null\"<|sep|><|close|>argument<|sep|>"
           "<|open|>argument key=\"d\" type=\"array\"<|sep|>[1, 2]<|close|>argument<|sep|>"
           "<|close|>call<|sep|><|close|>tools<|sep|>" +
           kEnd,
       "Hm.",
       "",
       {R"(f {"a": "{\"x\": ", "b": "True", "c": null, "d": [1, 2]})"}},
      {"a call with nothing inside, one with bare JSON, one with an empty block",
       "Hm." + kThinkEnd + kTools +
           "<|open|>call tool=\"f\" index=\"1\"<|sep|><|close|>call<|sep|>"
           "<|open|>call tool=\"g\" index=\"2\"<|sep|>\n{\"a\": 1}\n<|close|>call<|sep|>"
           "<|open|>call tool=\"h\" index=\"3\"<|sep|><|open|>json type=\"object\"<|sep|>"
           "<|close|>json<|sep|><|close|>call<|sep|>" +
           kEnd,
       "Hm.",
       "",
       {"f {}", "g {\"a\": 1}", "h {}"}},
      {"blanks between the sections",
       "Hm." + kThinkEnd + "\n\n" + kResponse + "4" + kResponseEnd + "\n" + kEnd, "Hm.", "4"},
      {"an answer outside of any section", "Hm." + kThinkEnd + "\n\nIt is 4.\n" + kEnd, "Hm.",
       "It is 4.\n"},
      {"a tag of another name",
       "Hm." + kThinkEnd + kResponse + "a<|open|>b x=\"y\"<|sep|>c<|close|>b<|sep|>d" +
           kResponseEnd + kEnd,
       "Hm.", "acd"},
      {"text after the end", opened + kEnd + "more" + kResponse + "and more", "Hm, é.", said},
      {"another speaker's message", opened + "<|open|>message role=\"user\"<|sep|>And 3+3?" + kEnd,
       "Hm, é.", said},
  };
}

void check_stream(const Stream& s, const Run& run) {
  CHECK(run.reply.reasoning == s.reasoning);
  CHECK(run.reply.answer == s.answer);
  std::vector<std::string> calls;
  for (const auto& c : run.reply.tool_calls) calls.push_back(c.name + " " + c.arguments);
  CHECK(calls == s.calls);
  CHECK(run.reply.finish_reason ==
        (s.calls.empty() ? FinishReason::kStop : FinishReason::kToolCalls));
  check_heard(run);
}

std::vector<std::size_t> every_byte(const std::string& s) {
  std::vector<std::size_t> cuts;
  for (std::size_t i = 1; i < s.size(); ++i) cuts.push_back(i);
  return cuts;
}

}  // namespace

TEST_CASE("whole and malformed replies give their parts, from text and from tokens") {
  for (const Stream& s : streams()) {
    CAPTURE(s.name);
    check_stream(s, run_text(s.text, {}));
    check_stream(s, run_text(s.text, every_byte(s.text)));
    for (const std::size_t n : {1, 3, 1000}) check_stream(s, run_tokens(tokens_of(s.text, n)));
  }
}

TEST_CASE("a stream cut in two at any byte, in three around any marker, gives the same") {
  for (const Stream& s : streams()) {
    CAPTURE(s.name);
    const std::string whole = describe(run_text(s.text, {}).reply);
    const auto check = [&](const std::vector<std::size_t>& cuts) {
      const Run run = run_text(s.text, cuts);
      const bool same = describe(run.reply) == whole && heard(run.events) == said(run.reply);
      if (same) return;
      CAPTURE(cuts.front());
      CAPTURE(cuts.back());
      CHECK(describe(run.reply) == whole);
      check_heard(run);
    };
    for (const std::size_t cut : every_byte(s.text)) check({cut});
    for (const auto& marker : kMarkers) {
      for (auto at = s.text.find(marker); at != s.text.npos; at = s.text.find(marker, at + 1)) {
        for (std::size_t a = at; a <= at + marker.size(); ++a) {
          for (std::size_t b = a; b <= std::min(at + marker.size() + 1, s.text.size()); ++b) {
            check({a, b});
          }
        }
      }
    }
  }
}

TEST_CASE("what cannot be a marker comes at once, what can waits") {
  ReplyParser parser(false);
  using Events = std::vector<ReplyEvent>;
  const auto answer = [](const char* text) { return Events{{Kind::kAnswer, text}}; };
  CHECK(parser.push_text("a <") == answer("a "));
  CHECK(parser.push_text("b <|") == answer("<b "));
  CHECK(parser.push_text("cl").empty());
  CHECK(parser.push_text("x") == answer("<|clx"));
  CHECK(parser.push_text("\xe6\x9d").empty());
  CHECK(parser.push_text("\xb1<|close|>") == answer("東"));
  CHECK(parser.push_text("resp").empty());
  CHECK(parser.push_text("!") == answer("<|close|>resp!"));
  CHECK(parser.push_text("<|sep|>") == answer("<|sep|>"));
  CHECK(parser.push_text("<|end_of_msg") == Events{});
  CHECK(parser.finish(FinishReason::kLength) ==
        Events{{Kind::kAnswer, "<|end_of_msg"}, {Kind::kFinish, "length"}});
  CHECK(parser.finish(FinishReason::kLength).empty());
  CHECK(parser.push_text("more").empty());
}

TEST_CASE("a string's characters are passed on as they come, JSON of other types when whole") {
  ReplyParser parser(false);
  using Events = std::vector<ReplyEvent>;
  const auto json = [](const char* text) { return Events{{Kind::kCallArguments, text}}; };
  CHECK(parser.push_text("<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"7\"<|sep|>") ==
        Events{{Kind::kCallStart, "f"}});
  CHECK(parser.push_text("<|open|>argument key=\"a\" type=\"string\"<|sep|>x") ==
        json("{\"a\": \"x"));
  CHECK(parser.push_text("y\n") == json("y\\n"));
  CHECK(parser.push_text("<|close|>argument<|sep|>") == json("\""));
  CHECK(parser.push_text("<|open|>argument key=\"b\" type=\"object\"<|sep|>{\"c\":").empty());
  CHECK(parser.push_text(" 1}<|close|>argument<|sep|>") == json(", \"b\": {\"c\": 1}"));
  CHECK(parser.push_text("<|close|>call<|sep|>") ==
        Events{{Kind::kCallArguments, "}"}, {Kind::kCallEnd, ""}});
  CHECK(parser.reply().tool_calls[0].index == 7);
  CHECK(parser.reply().tool_calls[0].is_json);
}

TEST_CASE("a budget that ends in the thinking is finish reason length with an empty answer") {
  for (const std::string text : {"Let me think", "Let me think<|close|>",
                                 "Let me think<|close|>thi", "Let me think<|open|>resp"}) {
    for (const Run& run : {run_text(text, {}, true, FinishReason::kLength),
                           run_tokens(tokens_of(text), true, FinishReason::kLength)}) {
      CHECK(run.reply.finish_reason == FinishReason::kLength);
      CHECK(run.reply.reasoning == "Let me think");
      CHECK(run.reply.answer.empty());
      check_heard(run);
    }
  }
}

TEST_CASE("the reason is length only where the message was not over") {
  const auto reason = [](const std::string& text, FinishReason why) {
    return run_text(text, {}, false, why).reply.finish_reason;
  };
  const std::string calls = "<|open|>tools<|sep|>" + kCall;
  CHECK(reason("4", FinishReason::kLength) == FinishReason::kLength);
  CHECK(reason("4", FinishReason::kStop) == FinishReason::kStop);
  CHECK(reason("4", FinishReason::kInterrupted) == FinishReason::kInterrupted);
  CHECK(reason("4<|close|>message", FinishReason::kLength) == FinishReason::kStop);
  CHECK(reason("4<|end_of_msg|>", FinishReason::kLength) == FinishReason::kStop);
  CHECK(reason(calls, FinishReason::kLength) == FinishReason::kLength);
  CHECK(reason(calls, FinishReason::kStop) == FinishReason::kToolCalls);
  CHECK(reason(calls + kEnd, FinishReason::kLength) == FinishReason::kToolCalls);
}

TEST_CASE("a call that the budget broke off stays as far as it came") {
  const Run run = run_text(
      "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>"
      "argument key=\"a\" type=\"string\"<|sep|>Asia/To",
      {}, false, FinishReason::kLength);
  REQUIRE(run.reply.tool_calls.size() == 1);
  const ParsedCall& call = run.reply.tool_calls[0];
  CHECK(call.arguments == "{\"a\": \"Asia/To");
  CHECK(!call.complete);
  CHECK(!call.is_json);
  CHECK(call.raw.starts_with("<|open|>call tool"));
  CHECK(call.raw.ends_with("Asia/To"));
  CHECK(to_message(run.reply).tool_calls.empty());
  check_heard(run);
  // Half a tag names no tool.
  CHECK(run_text("<|open|>tools<|sep|><|open|>call tool=\"get", {}, false, FinishReason::kLength)
            .reply.tool_calls.empty());
}

TEST_CASE("what a call's raw text holds is the call, tags included") {
  const Run run = run_text(kTools + kCall + " " + kRawCall + kEnd, {}, false);
  REQUIRE(run.reply.tool_calls.size() == 2);
  CHECK(run.reply.tool_calls[0].raw == kCall);
  CHECK(run.reply.tool_calls[1].raw == kRawCall);
  CHECK(run.reply.raw == kTools + kCall + " " + kRawCall + kEnd);
}

TEST_CASE("markers spelled in ordinary tokens are text, control tokens of no meaning are none") {
  const Run run = run_tokens({{"a <|close|>", false},
                              {"message", false},
                              {"<|sep|>", false},
                              {"<|media_pad|>", true},
                              {" b", false},
                              {"<|sep|>", true},
                              {"[EOS]", false},
                              {"[EOS]", true},
                              {"c", false}},
                             false);
  CHECK(run.reply.answer == "a <|close|>message<|sep|> b[EOS]");
  check_heard(run);
}

TEST_CASE("a real marker needs no separator behind a name it knows") {
  const Run run = run_tokens({{"Hm", false},
                              {"<|close|>", true},
                              {"think", false},
                              {"\n\n", false},
                              {"<|open|>", true},
                              {"responseIt is", false},
                              {" 4", false},
                              {"<|close|>", true},
                              {"?!", false},
                              {"<|end_of_msg|>", true}});
  CHECK(run.reply.reasoning == "Hm");
  CHECK(run.reply.answer == "It is 4?!");
  check_heard(run);
}

TEST_CASE("a head that never ends is text in the end, not a wait for ever") {
  ReplyParser parser(false);
  parser.push_text("<|open|>call tool=\"" + std::string(5000, 'x'));
  CHECK(parser.reply().answer.size() > 5000);
}

TEST_CASE("broken characters become U+FFFD and the parts stay UTF-8") {
  const Run run = run_tokens({{"a\xe6\x9d", false},
                              {"<|close|>", true},
                              {"think", false},
                              {"<|sep|>", true},
                              {"\xff", false},
                              {"b\xf0\x9f", false},
                              {"\x98\x80", false},
                              {"\xc3", false}});
  CHECK(run.reply.reasoning == "a\xef\xbf\xbd");
  CHECK(run.reply.answer ==
        "\xef\xbf\xbd"
        "b\xf0\x9f\x98\x80\xef\xbf\xbd");
  check_heard(run);
}

TEST_CASE("the markup that closes a broken reply makes it a whole one") {
  const auto closed = [](const std::string& text, bool thinking) {
    ReplyParser parser(thinking);
    for (const auto& t : tokens_of(text)) parser.push(t.bytes, t.is_control);
    const std::string before = join_segments(parser.closing());
    parser.finish(FinishReason::kInterrupted);
    CHECK(join_segments(parser.closing()) == before);
    return before;
  };
  CHECK(closed("Hm", true) == kThinkEnd + kResponse + kResponseEnd + kEnd);
  CHECK(closed("Hm" + kThinkEnd, true) == kResponse + kResponseEnd + kEnd);
  CHECK(closed("Hm" + kThinkEnd + kResponse + "4", true) == kResponseEnd + kEnd);
  CHECK(closed("4", false) == kResponseEnd + kEnd);
  CHECK(closed("4<|close|>response", false) == "<|sep|>" + kEnd);
  CHECK(closed("4" + kResponseEnd, false) == kEnd);
  CHECK(closed("4" + kResponseEnd + "<|close|>message<|sep|>", false) == "<|end_of_msg|>");
  CHECK(closed("4" + kResponseEnd + kEnd, false).empty());
  CHECK(closed(kTools + "<|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"a\" "
                        "type=\"string\"<|sep|>x",
               false) ==
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>" + kEnd);
}

TEST_CASE("random streams: the events are the reply, cuts change nothing, nothing is left open") {
  const std::vector<std::string> pieces = {"<|open|>",
                                           "<|close|>",
                                           "<|sep|>",
                                           "<|end_of_msg|>",
                                           "<|",
                                           "<|op",
                                           "think",
                                           "response",
                                           "tools",
                                           "call tool=\"f\" index=\"1\"",
                                           "call",
                                           "argument key=\"k\" type=\"string\"",
                                           "argument key=\"k\" type=\"object\"",
                                           "json type=\"object\"",
                                           "message",
                                           "argument",
                                           "json",
                                           "{\"a\": 1}",
                                           "{",
                                           "\"",
                                           " ",
                                           "\n",
                                           "x",
                                           "é",
                                           "\xe6\x9d",
                                           "\xff",
                                           "\\",
                                           "&quot;",
                                           kThinkEnd,
                                           kResponse,
                                           kResponseEnd,
                                           kTools,
                                           kCall,
                                           kRawCall,
                                           "<|close|>call<|sep|>",
                                           "<|close|>argument<|sep|>",
                                           "<|open|>argument key=\"k\" type=\"number\"<|sep|>",
                                           "<|open|>json type=\"object\"<|sep|>",
                                           "<|open|>call tool=\"g\" index=\"x\"<|sep|>"};
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  std::size_t n_calls = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string stream;
    for (std::size_t n = below(16); n > 0; --n) stream += pieces[below(pieces.size())];
    CAPTURE(stream);
    const bool thinking = below(2) == 0;
    const FinishReason why = below(2) == 0 ? FinishReason::kStop : FinishReason::kLength;
    std::vector<std::size_t> cuts;
    for (std::size_t b = 1; b < stream.size(); ++b) {
      if (below(4) == 0) cuts.push_back(b);
    }
    const Run whole = run_text(stream, {}, thinking, why);
    const Run cut = run_text(stream, cuts, thinking, why);
    CHECK(describe(whole.reply) == describe(cut.reply));
    check_heard(whole);
    check_heard(cut);
    const Run coarse = run_tokens(tokens_of(stream, 1000), thinking, why);
    const Run fine = run_tokens(tokens_of(stream, 1 + below(5)), thinking, why);
    CHECK(describe(coarse.reply) == describe(fine.reply));
    check_heard(coarse);
    check_heard(fine);
    for (const auto& call : coarse.reply.tool_calls) {
      ++n_calls;
      if (call.is_json) CHECK(ordered_json::parse(call.arguments).is_object());
    }
    CHECK(ordered_json::accept(write_reply_json(coarse.reply)));

    ReplyParser parser(thinking);
    for (const auto& t : tokens_of(stream)) parser.push(t.bytes, t.is_control);
    for (const auto& s : parser.closing()) parser.push(s.text, s.is_markup);
    CHECK(parser.done());
    CHECK(parser.closing().empty());
  }
  CHECK(n_calls > 300);
}
