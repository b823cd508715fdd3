#include "rank/chat.h"

#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "rank/chat_json.h"

using namespace k3;

namespace {

std::string rendered(const std::string& json) {
  return join_segments(render_chat(parse_chat_json(json, "chat.json").request));
}

// A request of these messages with thinking off, which leaves nothing but them and the prompt.
std::string rendered_messages(const std::string& messages) {
  const std::string all = rendered(R"({"thinking": false, "messages": )" + messages + "}");
  const std::string prompt = "<|open|>message role=\"assistant\"<|sep|><|open|>response<|sep|>";
  REQUIRE(all.ends_with(prompt));
  return all.substr(0, all.size() - prompt.size());
}

std::string message_of(const std::string& json) {
  try {
    render_chat(parse_chat_json(json, "chat.json").request);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string call(const std::string& id, const std::string& name, const std::string& arguments) {
  return R"({"id":")" + id + R"(","type":"function","function":{"name":")" + name +
         R"(","arguments":)" + arguments + "}}";
}

std::string result(const std::string& id, const std::string& content) {
  return R"({"role":"tool","tool_call_id":")" + id + R"(","content":")" + content + R"("})";
}

// "tool=NAME index=I CONTENT" of each result, in the order of the markup.
std::vector<std::string> results_of(const std::string& markup) {
  const std::string head = "<|open|>message role=\"tool\" tool=\"";
  std::vector<std::string> out;
  for (auto at = markup.find(head); at != markup.npos; at = markup.find(head, at + 1)) {
    const auto begin = at + head.size();
    out.push_back(markup.substr(begin, markup.find("<|close|>", begin) - begin));
  }
  return out;
}

}  // namespace

TEST_CASE("a list of messages alone is a request with the default effort") {
  const std::string text = rendered(R"([{"role":"user","content":"Hi"}])");
  CHECK(contains(text, "`thinking_effort=max`"));
  CHECK(
      text.ends_with("<|open|>message role=\"user\"<|sep|>Hi<|close|>message<|sep|>"
                     "<|end_of_msg|><|open|>message role=\"assistant\"<|sep|><|open|>think"
                     "<|sep|>"));
}

TEST_CASE("every way to say the effort is understood, medium is refused by name") {
  const auto effort = [](const std::string& members) {
    return parse_chat_json(R"({"messages":[{"role":"user","content":""}],)" + members + "}", "f")
        .request.effort;
  };
  CHECK(effort(R"("reasoning_effort":"low")") == ThinkingEffort::kLow);
  CHECK(effort(R"("thinking_effort":"high")") == ThinkingEffort::kHigh);
  CHECK(effort(R"("reasoning_effort":"off")") == ThinkingEffort::kOff);
  CHECK(effort(R"("reasoning_effort":"none")") == ThinkingEffort::kOff);
  CHECK(effort(R"("reasoning_effort":null)") == ThinkingEffort::kMax);
  CHECK(effort(R"("thinking":false,"reasoning_effort":"high")") == ThinkingEffort::kOff);
  CHECK(effort(R"("thinking":{"type":"enabled","effort":"low"})") == ThinkingEffort::kLow);
  CHECK(effort(R"("thinking":{"type":"disabled"})") == ThinkingEffort::kOff);
  CHECK(message_of(R"({"messages":[{"role":"user","content":""}],"reasoning_effort":"medium"})") ==
        "chat.json: reasoning_effort: thinking effort \"medium\": K3 is not invoked with it "
        "although its notice names it; expected off, low, high or max");
  for (const auto e :
       {ThinkingEffort::kOff, ThinkingEffort::kLow, ThinkingEffort::kHigh, ThinkingEffort::kMax}) {
    CHECK(parse_thinking_effort(thinking_effort_name(e)) == e);
  }
}

TEST_CASE("parts of a content are segments of their own, empty ones none") {
  const auto request = parse_chat_json(
      R"({"thinking":false,"messages":[{"role":"user","content":
          [{"type":"text","text":"a"},{"type":"text","text":""},"b"]}]})",
      "f");
  std::vector<std::string> plain;
  for (const auto& s : render_chat(request.request)) {
    if (!s.is_markup) plain.push_back(s.text);
  }
  CHECK(plain == std::vector<std::string>{"message", " role", "=\"", "user", "\"", "a", "b",
                                          "message", "message", " role", "=\"", "assistant", "\"",
                                          "response"});
}

TEST_CASE("developer speaks as system; every speaker may have a name") {
  CHECK(rendered_messages(
            R"([{"role":"developer","content":"x","name":"&\""},
                {"role":"assistant","content":"y","name":"N"}])") ==
        "<|open|>message role=\"system\" name=\"&amp;&quot;\"<|sep|>x<|close|>message<|sep|>"
        "<|end_of_msg|><|open|>message role=\"assistant\" name=\"N\"<|sep|><|open|>response<|sep|>y"
        "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>");
}

TEST_CASE("arguments keep their order, their types and every digit") {
  const std::string text = rendered_messages(
      R"([{"role":"assistant","content":null,"tool_calls":[)" +
      call("a", "f", R"({"s":"a<\"&\n","b":false,"i":12345678901234567890123,"d":1.0,"n":null,
                         "e":[],"o":{"z":1,"a":[1,"é"]}})") +
      "]}]");
  CHECK(contains(text, "key=\"s\" type=\"string\"<|sep|>a<\"&\n<|close|>"));
  CHECK(contains(text, "key=\"b\" type=\"boolean\"<|sep|>false<|close|>"));
  CHECK(contains(text, "key=\"i\" type=\"number\"<|sep|>12345678901234567890123<|close|>"));
  CHECK(contains(text, "key=\"d\" type=\"number\"<|sep|>1.0<|close|>"));
  CHECK(contains(text, "key=\"n\" type=\"null\"<|sep|>null<|close|>"));
  CHECK(contains(text, "key=\"e\" type=\"array\"<|sep|>[]<|close|>"));
  CHECK(contains(text, "key=\"o\" type=\"object\"<|sep|>{\"z\": 1, \"a\": [1, \"é\"]}<|close|>"));
}

TEST_CASE("arguments that are no JSON are shown as they are, none at all as none") {
  const auto arguments = [](const std::string& json) {
    const std::string text = rendered_messages(
        R"([{"role":"assistant","content":"","tool_calls":[)" + call("a", "f", json) + "]}]");
    const std::string begin = "index=\"1\"<|sep|>", end = "<|close|>call<|sep|>";
    const auto at = text.find(begin) + begin.size();
    return text.substr(at, text.find(end) - at);
  };
  CHECK(arguments(R"("{\"a\": <|sep|>")") ==
        "<|open|>json type=\"object\"<|sep|>{\"a\": <|sep|><|close|>json<|sep|>");
  CHECK(arguments(R"("")").empty());
  CHECK(arguments(R"(" \n")").empty());
  CHECK(arguments("null").empty());
  CHECK(arguments("{}").empty());
  CHECK(arguments(R"("{\"a\":\"b\"}")") == arguments(R"({"a":"b"})"));
}

TEST_CASE("results stand in the order of their calls, or all as given if one answers none") {
  const std::string calls = R"([{"role":"assistant","content":"","tool_calls":[)" +
                            call("a", "f", "{}") + "," + call("b", "g", "{}") + "," +
                            call("c", "h", "{}") + "]},";
  const auto order = [&](const std::string& results) {
    return results_of(rendered_messages(calls + results + "]"));
  };
  using Lines = std::vector<std::string>;
  CHECK(order(result("c", "3") + "," + result("a", "1") + "," + result("b", "2")) ==
        Lines{"f\" index=\"1\"<|sep|>1", "g\" index=\"2\"<|sep|>2", "h\" index=\"3\"<|sep|>3"});
  // Numbered by place, not by call.
  CHECK(order(result("c", "3") + "," + result("b", "2")) ==
        Lines{"g\" index=\"1\"<|sep|>2", "h\" index=\"2\"<|sep|>3"});
  CHECK(order(result("c", "3") + "," + result("?", "x") + "," + result("a", "1")) ==
        Lines{"h\" index=\"1\"<|sep|>3", "g\" index=\"2\"<|sep|>x", "f\" index=\"3\"<|sep|>1"});
  CHECK(order(R"({"role":"tool","name":"mine","content":"x"})") ==
        Lines{"mine\" index=\"1\"<|sep|>x"});
}

TEST_CASE("tool choice and response format are told after the messages") {
  const std::string messages = R"({"thinking":false,"messages":[{"role":"user","content":"q"}],)";
  CHECK(contains(rendered(messages + R"("tool_choice":"none"})"),
                 "type=\"tool-choice\"<|sep|>The system is invoked with `tool_choice=none`.\nYou "
                 "MUST NOT call any tools in the next message.<|close|>"));
  CHECK(contains(rendered(messages + R"("response_format":{"type":"json_object"}})"),
                 "type=\"response-format\"<|sep|>The system is invoked with "
                 "`response_format=json_object`.\nYour response must be raw JSON data without "
                 "markdown code blocks (```json) or any additional formatting.<|close|>"));
  const std::string plain = rendered(messages + R"("tool_choice":"auto"})");
  CHECK(plain == rendered(messages + R"("response_format":{"type":"text"},"tools":[]})"));
  const std::string both =
      rendered(messages + R"("tool_choice":"required","response_format":{"type":"json_object"}})");
  CHECK(both.find("tool-choice") < both.find("response-format"));
  CHECK(both.find("<|sep|>q<|close|>") < both.find("tool-choice"));
}

TEST_CASE("a prompt and the tail behind it are the whole prompt, wherever it is cut") {
  const std::string json =
      R"([{"role":"system","content":"s"},{"role":"user","content":"u"},
      {"role":"assistant","content":"","tool_calls":[)" +
      call("a", "f", "{}") + "," + call("b", "g", "{}") + "]}," + result("a", "1") + "," +
      result("b", "2") + R"(,{"role":"assistant","content":"done"},{"role":"user","content":"v"}])";
  const ChatRequest request = parse_chat_json(json, "f").request;
  for (std::size_t n = 0; n <= request.messages.size(); ++n) {
    ChatRequest head = request;
    head.messages.resize(n);
    head.add_generation_prompt = false;
    CHECK(join_segments(render_chat(head)) + join_segments(render_chat_tail(request, n)) ==
          join_segments(render_chat(request)));
  }
}

TEST_CASE("bad requests are refused with message and field") {
  const auto in_message = [](const std::string& members) {
    return message_of(R"({"messages":[{"role":"user","content":"x"},{)" + members + "}]}");
  };
  const auto in_call = [&](const std::string& c) {
    return in_message(R"("role":"assistant","content":"","tool_calls":[)" + c + "]");
  };
  CHECK(message_of("{") == "chat.json: not JSON at line 1, column 2");
  CHECK(message_of("7") == "chat.json: a number, expected an object with messages");
  CHECK(message_of("{}") == "chat.json: messages: missing, expected a list of messages");
  CHECK(message_of(R"({"messages":{}})") ==
        "chat.json: messages: an object, expected a list of messages");
  CHECK(message_of("[]") == "chat.json: messages: [], expected at least one message");
  CHECK(message_of("[3]") ==
        "chat.json: messages[0]: a number, expected an object with role and content");
  CHECK(in_message(R"("content":"x")") ==
        "chat.json: messages[1].role: missing, expected \"system\", \"user\", \"assistant\" or "
        "\"tool\"");
  CHECK(in_message(R"("role":"bot","content":"x")") ==
        "chat.json: messages[1].role: \"bot\", expected \"system\", \"user\", \"assistant\" or "
        "\"tool\"");
  CHECK(in_message(R"("role":"user")") ==
        "chat.json: messages[1].content: missing, expected a string or a list of parts");
  CHECK(in_message(R"("role":"user","content":5)") ==
        "chat.json: messages[1].content: a number, expected a string or a list of parts");
  CHECK(
      in_message(R"("role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}])") ==
      "chat.json: messages[1].content[1].type: \"image_url\", expected \"text\": images are not "
      "supported");
  CHECK(in_message(R"("role":"user","content":[{"type":"input_audio"}])") ==
        "chat.json: messages[1].content[0].type: \"input_audio\", expected \"text\"");
  CHECK(in_message(R"("role":"user","content":[{"type":"text"}])") ==
        "chat.json: messages[1].content[0].text: missing, expected a string");
  CHECK(in_message(R"("role":"assistant","content":"","tool_calls":{})") ==
        "chat.json: messages[1].tool_calls: an object, expected a list of calls");
  CHECK(in_call(R"({"id":"a"})") ==
        "chat.json: messages[1].tool_calls[0].name: missing, expected a tool's name");
  CHECK(in_call(R"("f")") ==
        "chat.json: messages[1].tool_calls[0]: a string, expected an object with a function");
  CHECK(in_call(call("a", "f", "[1]")) ==
        "chat.json: messages[1].tool_calls[0].function.arguments: a list, expected an object, or a "
        "string that holds one");
  CHECK(in_call(call("a", "f", R"("[1]")")) ==
        "chat.json: messages[1].tool_calls[0].function.arguments: a string that holds a list, "
        "expected an object");
  CHECK(in_message(R"("role":"tool","tool_call_id":"z","content":"x")") ==
        "messages[1].tool_call_id: \"z\" is no call of the assistant's message before it, and the "
        "message has no name");
  CHECK(in_message(R"("role":"system","content":"x","tools":[{}])")
            .starts_with("chat.json: messages[1].content: stands beside tools"));
  CHECK(message_of(R"({"messages":[{"role":"user","content":""}],"tools":["f"]})") ==
        "chat.json: tools[0]: a string, expected an object that describes a tool");
  CHECK(message_of(
            R"({"messages":[{"role":"user","content":""}],"tool_choice":{"type":"function"}})") ==
        "chat.json: tool_choice: an object, expected \"auto\", \"required\" or \"none\"");
  CHECK(message_of(
            R"({"messages":[{"role":"user","content":""}],"response_format":{"type":"xml"}})") ==
        "chat.json: response_format.type: \"xml\", expected \"text\", \"json_object\" or "
        "\"json_schema\"");
  CHECK(
      message_of(
          R"({"messages":[{"role":"user","content":""}],"response_format":{"type":"json_schema"}})") ==
      "chat.json: response_format.json_schema: missing, expected an object with a schema");
  CHECK(message_of(R"({"messages":[{"role":"user","content":""}],"thinking":1})") ==
        "chat.json: thinking: a number, expected true, false or an object");
}

TEST_CASE("members that have no effect are named") {
  CHECK(parse_chat_json(
            R"({"model":"k3","messages":[{"role":"user","content":""}],"temperature":0.5})", "f")
            .ignored == std::vector<std::string>{"model", "temperature"});
}
