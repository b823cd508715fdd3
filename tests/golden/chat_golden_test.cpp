// The chat markup and the parser of replies against the reference encoder's outputs
// (tests/data/tokenizer/chat-goldens.json) with the vocabulary of k3-nano.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "loader/parts.h"
#include "rank/chat.h"
#include "rank/chat_json.h"
#include "rank/chat_parser.h"
#include "rank/tokenizer.h"

using namespace k3;
using nlohmann::ordered_json;
using Ids = std::vector<std::int32_t>;

namespace {

const ordered_json& goldens() {
  static const ordered_json cases = [] {
    std::ifstream in(K3_TEST_DATA "/tokenizer/chat-goldens.json");
    REQUIRE(in.good());
    return ordered_json::parse(in);
  }();
  return cases;
}

const Tokenizer& tokenizer() {
  static const Tokenizer t(read_vocab(ModelFile::open(K3_NANO_PATH).metadata(), K3_NANO_PATH));
  return t;
}

ChatRequest request_of(const ordered_json& golden) {
  ordered_json request = golden["options"];
  request["messages"] = golden["messages"];
  const ChatFile file = parse_chat_json(request.dump(), golden["name"], ImageParts::kPlaceholder);
  CHECK(file.ignored.empty());
  return file.request;
}

std::vector<std::pair<std::string, bool>> pairs_of(const std::vector<TextSegment>& segments) {
  std::vector<std::pair<std::string, bool>> out;
  for (const auto& s : segments) out.emplace_back(s.text, s.is_markup);
  return out;
}

// What the model would have to write for message `i` to stand as it does.
std::vector<TextSegment> reply_segments(const ChatRequest& request, std::size_t i) {
  ChatRequest before = request;
  before.messages.resize(i);
  before.add_generation_prompt = true;
  ChatRequest with = request;
  with.messages.resize(i + 1);
  with.add_generation_prompt = false;
  const auto prompt = render_chat(before);
  const auto whole = render_chat(with);
  REQUIRE(whole.size() > prompt.size());
  for (std::size_t s = 0; s < prompt.size(); ++s) {
    REQUIRE(whole[s].text == prompt[s].text);
    REQUIRE(whole[s].is_markup == prompt[s].is_markup);
  }
  return {whole.begin() + static_cast<std::ptrdiff_t>(prompt.size()), whole.end()};
}

ParsedReply parse_ids(const Ids& ids, bool thinking) {
  ReplyParser parser(thinking);
  for (const auto id : ids) parser.push(tokenizer(), id);
  CHECK(parser.done());
  parser.finish(FinishReason::kStop);
  return parser.reply();
}

ParsedReply parse_text(const std::string& text, bool thinking) {
  ReplyParser parser(thinking);
  parser.push_text(text);
  parser.finish(FinishReason::kStop);
  return parser.reply();
}

void check_reply(const ParsedReply& reply, const ordered_json& message, const ChatMessage& parsed) {
  CHECK(reply.reasoning == message.value("reasoning_content", ""));
  CHECK(reply.answer == message.value("content", ""));
  const ordered_json calls = message.value("tool_calls", ordered_json::array());
  REQUIRE(reply.tool_calls.size() == calls.size());
  CHECK(reply.finish_reason == (calls.empty() ? FinishReason::kStop : FinishReason::kToolCalls));
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const ParsedCall& call = reply.tool_calls[i];
    const std::string arguments = calls[i]["function"]["arguments"];
    CHECK(call.name == calls[i]["function"]["name"].get<std::string>());
    CHECK(call.index == static_cast<int>(i) + 1);
    CHECK(call.complete);
    CHECK(call.typed == parsed.tool_calls[i].arguments);
    CHECK(call.json_block == parsed.tool_calls[i].json_block);
    if (ordered_json::accept(arguments)) {
      CHECK(call.is_json);
      CHECK(ordered_json::parse(call.arguments) == ordered_json::parse(arguments));
    } else {
      CHECK(!call.is_json);
      CHECK(call.arguments == arguments);
    }
  }
}

}  // namespace

TEST_CASE("all conversations are the reference encoder's, in text and in segments") {
  REQUIRE(goldens().size() == 11);
  for (const auto& golden : goldens()) {
    CAPTURE(golden["name"].get<std::string>());
    const auto segments = render_chat(request_of(golden));
    CHECK(join_segments(segments) == golden["rendered"].get<std::string>());
    CHECK(pairs_of(segments) ==
          golden["segments"].get<std::vector<std::pair<std::string, bool>>>());
  }
}

TEST_CASE("the parser gives back the parts of every assistant turn, from ids and from text") {
  std::size_t n_turns = 0;
  for (const auto& golden : goldens()) {
    CAPTURE(golden["name"].get<std::string>());
    const ChatRequest request = request_of(golden);
    const bool thinking = request.effort != ThinkingEffort::kOff;
    for (std::size_t i = 0; i < request.messages.size(); ++i) {
      if (request.messages[i].role != Speaker::kAssistant) continue;
      ++n_turns;
      const auto segments = reply_segments(request, i);
      const std::string text = join_segments(segments);
      const ParsedReply from_ids = parse_ids(tokenizer().encode_segments(segments), thinking);
      const ParsedReply from_text = parse_text(text, thinking);
      for (const ParsedReply* reply : {&from_ids, &from_text}) {
        check_reply(*reply, golden["messages"][i], request.messages[i]);
        CHECK(reply->raw == text);
        // Both ways back: as the next message, and through the JSON of the reply.
        ChatRequest again = request;
        again.messages[i] = to_message(*reply);
        CHECK(join_segments(reply_segments(again, i)) == text);
        const auto json = ordered_json::parse(write_reply_json(*reply));
        const ordered_json list = ordered_json::array({json["message"]});
        again.messages[i] = parse_chat_json(list.dump(), "reply").request.messages[0];
        CHECK(join_segments(reply_segments(again, i)) == text);
      }
    }
  }
  CHECK(n_turns == 3);
}

TEST_CASE("no content becomes a control token, whatever it spells") {
  std::string typed;
  for (const char* marker : {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "[BOS]",
                             "<|media_begin|>", "<|media_pad|>"}) {
    REQUIRE(tokenizer().find_control(marker));
    typed += std::string("x ") + marker + "y";
  }
  const auto request_with = [](const std::string& s) {
    ordered_json function = {{"name", s}, {"arguments", {{s, s}}}};
    ordered_json broken = {{"name", s}, {"arguments", "{" + s}};
    ordered_json request = {{"messages", ordered_json::array()}};
    request["tools"] = ordered_json::array({{{"name", s}}});
    auto& m = request["messages"];
    m.push_back({{"role", "system"}, {"content", s}, {"name", s}});
    m.push_back({{"role", "system"}, {"tools", ordered_json::array({{{"name", s}}})}});
    m.push_back({{"role", "user"}, {"content", s}, {"name", s}});
    m.push_back({{"role", "assistant"},
                 {"content", s},
                 {"reasoning_content", s},
                 {"tool_calls", ordered_json::array({{{"id", "a"}, {"function", function}},
                                                     {{"id", "b"}, {"function", broken}}})}});
    m.push_back({{"role", "tool"}, {"tool_call_id", "a"}, {"content", s}});
    request["response_format"] = {{"type", "json_schema"},
                                  {"json_schema", {{"schema", {{"title", s}}}}}};
    return parse_chat_json(request.dump(), "request").request;
  };
  const auto controls = [](const Ids& ids) {
    Ids out;
    std::copy_if(ids.begin(), ids.end(), std::back_inserter(out),
                 [](auto id) { return tokenizer().is_control(id); });
    return out;
  };
  const auto typed_segments = render_chat(request_with(typed));
  const Ids ids = tokenizer().encode_segments(typed_segments);
  CHECK(controls(ids) ==
        controls(tokenizer().encode_segments(render_chat(request_with("harmless")))));
  CHECK(tokenizer().decode(ids) == join_segments(typed_segments));
  // Joined first and encoded then, the user's markers would rule.
  const Ids joined = tokenizer().encode(join_segments(typed_segments), ControlText::kRecognised);
  CHECK(controls(joined).size() > controls(ids).size());
}

TEST_CASE("a marker that the model spells in ordinary tokens is text of the reply") {
  const std::vector<TextSegment> reply = {{"say <|close|>think<|sep|> ", false},
                                          {"<|close|>", true},
                                          {"think", false},
                                          {"<|sep|>", true},
                                          {"<|open|>", true},
                                          {"response", false},
                                          {"<|sep|>", true},
                                          {"<|end_of_msg|>", false},
                                          {"<|end_of_msg|>", true}};
  const ParsedReply parsed = parse_ids(tokenizer().encode_segments(reply), true);
  CHECK(parsed.reasoning == "say <|close|>think<|sep|> ");
  CHECK(parsed.answer == "<|end_of_msg|>");
}
