#include "rank/chat_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "rank/chat_tags.h"
#include "rank/json_text.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

constexpr JsonStyle kDeclared{.compact = true, .sorted = true};

// A value and how to name it in a message: "messages[2].content".
struct Field {
  const Json& value;
  std::string name;

  [[noreturn]] void refuse(std::string_view expected) const {
    throw std::invalid_argument(
        fmt::format("{}: {}, expected {}", name, describe_json(value), expected));
  }
  [[noreturn]] void refuse_value(std::string_view expected) const {
    throw std::invalid_argument(
        fmt::format("{}: {}, expected {}", name, write_json(value), expected));
  }
  // Null where there is no such member, or it is null: the format does not tell the two apart.
  std::optional<Field> find(const char* key) const {
    const auto it = value.find(key);
    if (it == value.end() || it->is_null()) return std::nullopt;
    return Field{*it, name.empty() ? std::string(key) : fmt::format("{}.{}", name, key)};
  }
  Field require(const char* key, std::string_view expected) const {
    if (auto f = find(key)) return *f;
    throw std::invalid_argument(
        fmt::format("{}{}{}: missing, expected {}", name, name.empty() ? "" : ".", key, expected));
  }
  Field at(std::size_t i) const { return {value[i], fmt::format("{}[{}]", name, i)}; }
  const std::string& text() const {
    if (!value.is_string()) refuse("a string");
    return value.get_ref<const std::string&>();
  }
  bool boolean() const {
    if (!value.is_boolean()) refuse("true or false");
    return value.get<bool>();
  }
  std::string text_or_empty(const char* key) const {
    const auto f = find(key);
    return f ? f->text() : std::string();
  }
};

ContentPart read_part(const Field& part, ImageParts images) {
  if (part.value.is_string()) return {part.text()};
  if (!part.value.is_object()) part.refuse("an object with a type");
  const Field type = part.require("type", "\"text\"");
  if (type.text() == "text") return {part.require("text", "a string").text()};
  const bool is_image = type.text() == "image_url" || type.text() == "image";
  if (!is_image) type.refuse_value("\"text\"");
  if (images == ImageParts::kRefuse) {
    type.refuse_value("\"text\": images are not supported");
  }
  const auto url = part.find("image_url");
  return {url && url->value.is_object() ? url->text_or_empty("url") : std::string(), true};
}

std::vector<ContentPart> read_content(const Field& content, ImageParts images) {
  if (content.value.is_string()) return {{content.text()}};
  if (!content.value.is_array()) content.refuse("a string or a list of parts");
  std::vector<ContentPart> parts;
  for (std::size_t i = 0; i < content.value.size(); ++i) {
    parts.push_back(read_part(content.at(i), images));
  }
  return parts;
}

// The list as the markup declares it; empty where it is.
std::string read_tools(const Field& tools) {
  if (!tools.value.is_array()) tools.refuse("a list of tools");
  for (std::size_t i = 0; i < tools.value.size(); ++i) {
    if (!tools.value[i].is_object()) tools.at(i).refuse("an object that describes a tool");
  }
  return tools.value.empty() ? std::string() : write_json(tools.value, kDeclared);
}

std::string_view markup_type(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::boolean:
      return "boolean";
    case Json::value_t::string:
      return "string";
    case Json::value_t::object:
      return "object";
    case Json::value_t::array:
      return "array";
    default:
      return "number";
  }
}

std::vector<ToolArgument> typed_arguments(const Json& object) {
  std::vector<ToolArgument> out;
  for (const auto& item : object.items()) {
    const Json& value = item.value();
    out.push_back({item.key(), std::string(markup_type(value)),
                   value.is_string() ? value.get<std::string>() : write_json(value)});
  }
  return out;
}

// A string that is not JSON was written by a model and is shown to it again as it is; JSON of
// another kind than an object can only be the caller's mistake.
void read_arguments(const Field& arguments, ToolCall& call) {
  if (arguments.value.is_object()) {
    call.arguments = typed_arguments(arguments.value);
    return;
  }
  if (!arguments.value.is_string()) arguments.refuse("an object, or a string that holds one");
  const std::string& text = arguments.text();
  if (is_blank(text)) return;
  Json parsed;
  try {
    parsed = read_json(text);
  } catch (const std::invalid_argument&) {
    call.json_block = text;
    return;
  }
  if (!parsed.is_object()) {
    throw std::invalid_argument(fmt::format("{}: a string that holds {}, expected an object",
                                            arguments.name, describe_json(parsed)));
  }
  call.arguments = typed_arguments(parsed);
}

ToolCall read_call(const Field& field) {
  if (!field.value.is_object()) field.refuse("an object with a function");
  ToolCall call;
  call.id = field.text_or_empty("id");
  const Field function = field.find("function").value_or(field);
  if (!function.value.is_object()) function.refuse("an object with a name");
  call.name = function.require("name", "a tool's name").text();
  if (const auto arguments = function.find("arguments")) read_arguments(*arguments, call);
  return call;
}

std::vector<ToolCall> read_calls(const Field& calls) {
  if (!calls.value.is_array()) calls.refuse("a list of calls");
  std::vector<ToolCall> out;
  for (std::size_t i = 0; i < calls.value.size(); ++i) out.push_back(read_call(calls.at(i)));
  return out;
}

Speaker read_role(const Field& role) {
  const std::string& name = role.text();
  if (name == "system" || name == "developer") return Speaker::kSystem;
  if (name == "user") return Speaker::kUser;
  if (name == "assistant") return Speaker::kAssistant;
  if (name == "tool") return Speaker::kTool;
  role.refuse_value("\"system\", \"user\", \"assistant\" or \"tool\"");
}

ChatMessage read_message(const Field& field, ImageParts images) {
  if (!field.value.is_object()) field.refuse("an object with role and content");
  ChatMessage m;
  m.role = read_role(field.require("role", "\"system\", \"user\", \"assistant\" or \"tool\""));
  m.name = field.text_or_empty("name");
  if (const auto content = field.find("content")) m.content = read_content(*content, images);
  bool may_be_silent = false;
  if (m.role == Speaker::kAssistant) {
    m.reasoning = field.text_or_empty("reasoning_content");
    if (m.reasoning.empty()) m.reasoning = field.text_or_empty("reasoning");
    if (const auto calls = field.find("tool_calls")) m.tool_calls = read_calls(*calls);
    may_be_silent = !m.tool_calls.empty() || !m.reasoning.empty();
  }
  if (m.role == Speaker::kTool) {
    m.tool_call_id = field.text_or_empty("tool_call_id");
    if (const auto tool = field.find("tool")) m.name = tool->text();
  }
  if (m.role == Speaker::kSystem) {
    if (const auto tools = field.find("tools")) m.tools = read_tools(*tools);
    may_be_silent = !m.tools.empty();
    const bool speaks = std::any_of(m.content.begin(), m.content.end(), [](const auto& part) {
      return part.is_image || !part.text.empty();
    });
    if (may_be_silent && speaks) {
      throw std::invalid_argument(field.name +
                                  ".content: stands beside tools, expected two system messages: a "
                                  "message that adds tools holds nothing else");
    }
  }
  if (!may_be_silent) field.require("content", "a string or a list of parts");
  return m;
}

ThinkingEffort read_effort(const Field& effort) {
  try {
    return parse_thinking_effort(effort.text());
  } catch (const std::invalid_argument& e) {
    if (!effort.value.is_string()) throw;
    throw std::invalid_argument(fmt::format("{}: {}", effort.name, e.what()));
  }
}

void read_thinking(const Field& request, ChatRequest& out) {
  for (const char* key : {"reasoning_effort", "thinking_effort"}) {
    if (const auto effort = request.find(key)) out.effort = read_effort(*effort);
  }
  const auto thinking = request.find("thinking");
  if (!thinking) return;
  bool on = true;
  if (thinking->value.is_object()) {
    if (const auto effort = thinking->find("effort")) out.effort = read_effort(*effort);
    if (const auto type = thinking->find("type")) {
      on = type->text() == "enabled";
      if (!on && type->text() != "disabled") type->refuse_value("\"enabled\" or \"disabled\"");
    }
  } else {
    if (!thinking->value.is_boolean()) thinking->refuse("true, false or an object");
    on = thinking->boolean();
  }
  if (!on) out.effort = ThinkingEffort::kOff;
}

ToolChoice read_tool_choice(const Field& choice) {
  constexpr std::string_view kExpected = "\"auto\", \"required\" or \"none\"";
  if (!choice.value.is_string()) choice.refuse(kExpected);
  if (choice.text() == "auto") return ToolChoice::kAuto;
  if (choice.text() == "required") return ToolChoice::kRequired;
  if (choice.text() == "none") return ToolChoice::kNone;
  choice.refuse_value(kExpected);
}

void read_format(const Field& format, ChatRequest& out) {
  const bool is_object = format.value.is_object();
  constexpr std::string_view kExpected = "\"text\", \"json_object\" or \"json_schema\"";
  const Field type = is_object ? format.require("type", kExpected) : format;
  if (type.text() == "text") return;
  if (type.text() == "json_object") {
    out.response_format = ResponseFormat::kJsonObject;
    return;
  }
  if (type.text() != "json_schema") type.refuse_value(kExpected);
  if (!is_object) format.refuse("an object with a json_schema");
  const Field holder = format.require("json_schema", "an object with a schema");
  if (!holder.value.is_object()) holder.refuse("an object with a schema");
  out.response_format = ResponseFormat::kJsonSchema;
  out.response_schema = write_json(holder.find("schema").value_or(holder).value, kDeclared);
}

void read_messages(const Field& messages, ImageParts images, ChatRequest& out) {
  if (!messages.value.is_array()) messages.refuse("a list of messages");
  if (messages.value.empty()) messages.refuse_value("at least one message");
  for (std::size_t i = 0; i < messages.value.size(); ++i) {
    out.messages.push_back(read_message(messages.at(i), images));
  }
}

ChatFile read_request(const Json& root, ImageParts images) {
  constexpr std::array kKnown = {
      "messages",         "tools",           "tool_choice", "response_format",
      "reasoning_effort", "thinking_effort", "thinking",    "add_generation_prompt"};
  ChatFile file;
  ChatRequest& out = file.request;
  if (root.is_array()) {
    read_messages({root, "messages"}, images, out);
    return file;
  }
  const Field request{root, ""};
  if (!root.is_object()) {
    throw std::invalid_argument(
        fmt::format("{}, expected an object with messages", describe_json(root)));
  }
  read_messages(request.require("messages", "a list of messages"), images, out);
  if (const auto tools = request.find("tools")) out.tools = read_tools(*tools);
  if (const auto choice = request.find("tool_choice")) out.tool_choice = read_tool_choice(*choice);
  if (const auto format = request.find("response_format")) read_format(*format, out);
  if (const auto f = request.find("add_generation_prompt"))
    out.add_generation_prompt = f->boolean();
  read_thinking(request, out);
  for (const auto& item : root.items()) {
    if (std::find(kKnown.begin(), kKnown.end(), item.key()) == kKnown.end()) {
      file.ignored.push_back(item.key());
    }
  }
  return file;
}

}  // namespace

ChatFile parse_chat_json(std::string_view text, const std::string& source, ImageParts images) {
  try {
    return read_request(read_json(text), images);
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(fmt::format("{}: {}", source, e.what()));
  }
}

std::string write_reply_json(const ParsedReply& reply, int first_call) {
  Json message = {{"role", "assistant"}, {"content", reply.answer}};
  if (!reply.reasoning.empty()) message["reasoning_content"] = reply.reasoning;
  for (const auto& call : reply.tool_calls) {
    Json function = {{"name", call.name}, {"arguments", call.arguments}};
    message["tool_calls"].push_back(Json::object({{"id", fmt::format("call_{}", first_call++)},
                                                  {"type", "function"},
                                                  {"function", std::move(function)}}));
  }
  return write_json({{"message", std::move(message)},
                     {"finish_reason", finish_reason_name(reply.finish_reason)}});
}

}  // namespace k3
