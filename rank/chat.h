// A conversation as Kimi K3 reads it: the markup around messages, tools and notices.
//
// The markup is a list of segments (rank/tokenizer.h): the structure's control tokens are markup,
// all that a user, a tool or a name brings is plain text and never becomes a control token. Each
// segment is encoded by itself, so a value never joins with the quote behind it.
// Source: outputs of Moonshot's published encoder; tests/data/tokenizer/chat-goldens.json.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rank/tokenizer.h"

namespace k3 {

enum class ThinkingEffort { kOff, kLow, kHigh, kMax };

// "off" (or "none"), "low", "high", "max". Throws std::invalid_argument naming the four for
// anything else, "medium" too: the notice that the model reads lists it, the encoder refuses it.
ThinkingEffort parse_thinking_effort(std::string_view name);
std::string_view thinking_effort_name(ThinkingEffort effort);

enum class ToolChoice { kAuto, kRequired, kNone };
enum class ResponseFormat { kText, kJsonObject, kJsonSchema };
enum class Speaker { kSystem, kUser, kAssistant, kTool };

struct ContentPart {
  std::string text;
  bool is_image = false;  // then `text` is its address
};

// One argument of a call as the markup carries it.
struct ToolArgument {
  std::string key;
  std::string type;   // "string", "number", "boolean", "null", "object", "array"
  std::string value;  // a string's own characters; JSON text for the other types
  bool operator==(const ToolArgument&) const = default;
};

struct ToolCall {
  std::string id;  // what a result refers to; not in the markup
  std::string name;
  std::vector<ToolArgument> arguments;    // in the caller's order
  std::optional<std::string> json_block;  // in place of `arguments`: arguments that are not JSON
};

struct ChatMessage {
  Speaker role = Speaker::kUser;
  std::string name;                  // of the speaker; of the tool in a tool's result
  std::vector<ContentPart> content;  // nothing stands between two parts
  std::string reasoning;             // assistant; left out of the markup where thinking is off
  std::vector<ToolCall> tool_calls;  // assistant
  std::string tool_call_id;          // tool
  std::string tools;                 // system: JSON list of tools that it adds; replaces content
};

struct ChatRequest {
  std::vector<ChatMessage> messages;
  std::string tools;  // JSON list as write_json spells it compact and sorted; empty: no tools
  ToolChoice tool_choice = ToolChoice::kAuto;
  ResponseFormat response_format = ResponseFormat::kText;
  std::string response_schema;  // JSON, compact and sorted; with kJsonSchema only
  ThinkingEffort effort = ThinkingEffort::kMax;
  bool add_generation_prompt = true;  // ends inside the reply: its thinking, or its response
};

// The whole prompt: tools, thinking effort, messages, tool choice, response format, the opening of
// the reply. Results of tools are put into the order of the calls they answer where each of a run
// names one. Throws std::invalid_argument naming the message: a tool's result whose tool's name
// neither it nor the call before it gives.
std::vector<TextSegment> render_chat(const ChatRequest& request);

// render_chat without its first notices and without messages[0, first): what is still to be read
// once those have been, be it as a prompt or as a reply of the model's own. The earlier messages
// still name the tools of the results among the later ones.
std::vector<TextSegment> render_chat_tail(const ChatRequest& request, std::size_t first);

// The segments' text, joined: for people to read, not to be encoded.
std::string join_segments(const std::vector<TextSegment>& segments);

}  // namespace k3
