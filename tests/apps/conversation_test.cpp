#include "apps/conversation.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "loader/parts.h"
#include "rank/chat_json.h"

using namespace k3;
using Ids = std::vector<std::int32_t>;

namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer t(read_vocab(ModelFile::open(K3_NANO_PATH).metadata(), K3_NANO_PATH));
  return t;
}

ChatRequest request_of(const std::string& json) { return parse_chat_json(json, "request").request; }

const std::string kReply =
    "Sum.<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|><|close|>message<|"
    "sep|>"
    "<|end_of_msg|>";

// The model says `text`, markup and all, and the chat goes on behind it.
void reply(Conversation& chat, const std::string& text, FinishReason why = FinishReason::kStop) {
  const Ids drawn = tokenizer().encode(text, ControlText::kRecognised);
  ReplyParser parser(chat.thinking());
  for (const std::int32_t id : drawn) parser.push(tokenizer(), id);
  parser.finish(why);
  chat.replied(parser, drawn, true);
}

// All that the slot holds after `input` when it held `before`.
Ids after(const Ids& before, const Conversation::Input& input) {
  Ids all = input.reset ? Ids() : before;
  all.insert(all.end(), input.ids.begin(), input.ids.end());
  return all;
}

Ids whole_prompt(const ChatRequest& request) {
  return tokenizer().encode_segments(render_chat(request));
}

}  // namespace

TEST_CASE("turn by turn the slot holds what the whole conversation would be rendered as") {
  Conversation chat(tokenizer(),
                    request_of(R"([{"role": "system", "content": "Answer briefly."}])"));
  CHECK_FALSE(chat.waits_for_reply());
  chat.say("What is 2+2?");
  CHECK(chat.waits_for_reply());
  Conversation::Input in = chat.input();
  CHECK(in.reset);
  CHECK(in.n_fresh == in.ids.size());
  CHECK(in.ids == whole_prompt(chat.request()));
  reply(chat, kReply);
  CHECK(chat.n_message() == 3);
  // All but the last id drawn has been read.
  const Ids slot(chat.ids().begin(), chat.ids().end() - 1);
  chat.say("And <|end_of_msg|> 3+3?");
  in = chat.input();
  CHECK_FALSE(in.reset);
  CHECK(in.n_fresh + 1 == in.ids.size());
  CHECK(after(slot, in) == whole_prompt(chat.request()));
}

TEST_CASE("a reply that broke off is closed before the next message") {
  for (const char* broken : {"Hm", "Hm.<|close|>think<|sep|><|open|>response<|sep|>Fo",
                             "Hm.<|close|>think<|sep|><|open|>resp"}) {
    CAPTURE(broken);
    Conversation chat(tokenizer(), ChatRequest());
    chat.say("What is 2+2?");
    reply(chat, broken, FinishReason::kInterrupted);
    Ids slot(chat.ids().begin(), chat.ids().end() - 1);
    chat.say("And 3+3?");
    const Conversation::Input in = chat.input();
    const std::string text = tokenizer().decode(after(slot, in));
    CHECK(
        text.find("<|close|>message<|sep|><|end_of_msg|><|open|>message role=\"user\"<|sep|>And") !=
        std::string::npos);
    CHECK(text.ends_with("<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>"));
  }
}

TEST_CASE("an end token that does not close the message is not read again") {
  Conversation chat(tokenizer(), ChatRequest());
  chat.say("What is 2+2?");
  Ids drawn = tokenizer().encode("Hm", ControlText::kAsText);
  ReplyParser parser(true);
  for (const std::int32_t id : drawn) parser.push(tokenizer(), id);
  parser.finish(FinishReason::kStop);
  drawn.push_back(*tokenizer().find_control("[EOS]"));
  chat.replied(parser, drawn, false);
  const Ids slot(chat.ids().begin(), chat.ids().end());
  CHECK(slot.back() == drawn[drawn.size() - 2]);
  chat.say("And?");
  const std::string text = tokenizer().decode(after(slot, chat.input()));
  CHECK(text.find("[EOS]") == std::string::npos);
  CHECK(text.find("Hm<|close|>think<|sep|>") != std::string::npos);
}

TEST_CASE(
    "messages that were taken back leave no trace, even if the model had begun to read them") {
  Conversation chat(tokenizer(), ChatRequest());
  chat.say("What is 2+2?");
  reply(chat, kReply);
  const Ids said(chat.ids().begin(), chat.ids().end());
  const std::size_t before = chat.n_message();
  chat.say("Never mind.");
  chat.take_back(before, true);
  CHECK(chat.n_message() == before);
  chat.say("And 3+3?");
  const Conversation::Input in = chat.input();
  CHECK(in.reset);
  CHECK(in.ids == whole_prompt(chat.request()));
  CHECK(in.ids.size() == said.size() + in.n_fresh);
}

TEST_CASE("a reset keeps system messages and nothing else") {
  Conversation chat(tokenizer(), request_of(R"([{"role": "system", "content": "Be brief."},
                                                {"role": "user", "content": "What is 2+2?"}])"));
  CHECK(chat.waits_for_reply());
  reply(chat, kReply);
  chat.clear();
  CHECK(chat.n_message() == 1);
  chat.say("And 3+3?");
  CHECK(chat.input().reset);
  CHECK(chat.input().ids == whole_prompt(chat.request()));
}

TEST_CASE("calls wait for their results, which go to the call they answer") {
  Conversation chat(tokenizer(), ChatRequest());
  chat.say("What time is it?");
  reply(chat,
        "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        "<|open|>call tool=\"get_time\" index=\"1\"<|sep|><|close|>call<|sep|>"
        "<|open|>call tool=\"get_zone\" index=\"2\"<|sep|><|close|>call<|sep|>"
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>");
  REQUIRE(chat.calls_waiting().size() == 2);
  CHECK_FALSE(chat.waits_for_reply());
  chat.say_result(chat.calls_waiting()[0], "09:41");
  REQUIRE(chat.calls_waiting().size() == 1);
  CHECK(chat.calls_waiting()[0].name == "get_zone");
  CHECK_FALSE(chat.waits_for_reply());
  chat.say_result(chat.calls_waiting()[0], "CET");
  CHECK(chat.calls_waiting().empty());
  CHECK(chat.waits_for_reply());
  const std::string text = tokenizer().decode(chat.input().ids);
  CHECK(text.find("<|open|>message role=\"tool\" tool=\"get_time\" index=\"1\"<|sep|>09:41") !=
        std::string::npos);
  CHECK(text.find("<|open|>message role=\"tool\" tool=\"get_zone\" index=\"2\"<|sep|>CET") !=
        std::string::npos);
}
