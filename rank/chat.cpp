#include "rank/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <utility>

#include "rank/chat_tags.h"

namespace k3 {
namespace {

// Stands for an image's embeddings; no vocabulary has a token of this name.
constexpr std::string_view kImagePlaceholder = "<|kimi_image_placeholder|>";

constexpr std::string_view kToolsIntro =
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n";
constexpr std::string_view kNewToolsIntro =
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n";
constexpr std::string_view kEffortNotice =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`.";
constexpr std::string_view kToolChoiceNotice =
    "The system is invoked with `tool_choice={}`.\nYou MUST {} in the next message.";
constexpr std::string_view kFormatNotice =
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without "
    "markdown code blocks (```json) or any additional formatting.";
constexpr std::string_view kSchemaIntro = "\nThe JSON data must match the following schema:\n";

std::string fenced(std::string_view json) { return fmt::format("```json\n{}\n```", json); }

struct Attribute {
  std::string_view key;
  std::string value;
};

std::string escape_attribute(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

class Markup {
 public:
  void control(std::string_view spelling) { segments_.push_back({std::string(spelling), true}); }
  void text(std::string_view text) {
    if (!text.empty()) segments_.push_back({std::string(text), false});
  }
  void open(std::string_view tag, const std::vector<Attribute>& attributes = {}) {
    control("<|open|>");
    text(tag);
    for (const auto& [key, value] : attributes) {
      text(fmt::format(" {}", key));
      text("=\"");
      text(escape_attribute(value));
      text("\"");
    }
    control("<|sep|>");
  }
  void close(std::string_view tag) {
    control("<|close|>");
    text(tag);
    control("<|sep|>");
  }
  void end_message() {
    close("message");
    control("<|end_of_msg|>");
  }
  void notice(std::string_view type, std::string_view body) {
    open("message", {{"role", "system"}, {"type", std::string(type)}});
    text(body);
    end_message();
  }
  void content(const std::vector<ContentPart>& parts) {
    for (const auto& part : parts) part.is_image ? control(kImagePlaceholder) : text(part.text);
  }
  std::vector<TextSegment> take() { return std::move(segments_); }

 private:
  std::vector<TextSegment> segments_;
};

void render_call(const ToolCall& call, std::size_t index, Markup& out) {
  out.open("call", {{"tool", call.name}, {"index", std::to_string(index)}});
  if (call.json_block) {
    out.open("json", {{"type", "object"}});
    out.text(*call.json_block);
    out.close("json");
  } else {
    for (const auto& [key, type, value] : call.arguments) {
      out.open("argument", {{"key", key}, {"type", type}});
      out.text(value);
      out.close("argument");
    }
  }
  out.close("call");
}

void render_reply(const ChatMessage& message, bool thinking, Markup& out) {
  // An empty pair stays: a turn without it reads as one made with thinking off.
  if (thinking) {
    out.open("think");
    if (!is_blank(message.reasoning)) out.text(message.reasoning);
    out.close("think");
  }
  out.open("response");
  out.content(message.content);
  out.close("response");
  if (message.tool_calls.empty()) return;
  out.open("tools");
  for (std::size_t i = 0; i < message.tool_calls.size(); ++i) {
    render_call(message.tool_calls[i], i + 1, out);
  }
  out.close("tools");
}

std::string_view role_name(Speaker role) {
  switch (role) {
    case Speaker::kSystem:
      return "system";
    case Speaker::kUser:
      return "user";
    case Speaker::kAssistant:
      return "assistant";
    case Speaker::kTool:
      return "tool";
  }
  return {};
}

void render_spoken(const ChatMessage& message, bool thinking, Markup& out) {
  if (message.role == Speaker::kSystem && !message.tools.empty()) {
    out.notice("tool-declare", std::string(kNewToolsIntro) + fenced(message.tools));
    return;
  }
  std::vector<Attribute> attributes = {{"role", std::string(role_name(message.role))}};
  if (!message.name.empty()) attributes.push_back({"name", message.name});
  out.open("message", attributes);
  if (message.role == Speaker::kAssistant) {
    render_reply(message, thinking, out);
  } else {
    out.content(message.content);
  }
  out.end_message();
}

// Where in `calls` the result's call stands, or nowhere.
std::optional<std::size_t> call_of(const ChatMessage& result, const std::vector<ToolCall>& calls) {
  if (result.tool_call_id.empty()) return std::nullopt;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].id == result.tool_call_id) return i;
  }
  return std::nullopt;
}

// messages[begin, end) are results of tools; `n_before` results have followed `calls` already.
void render_results(const ChatRequest& request, std::size_t begin, std::size_t end,
                    const std::vector<ToolCall>& calls, std::size_t n_before, Markup& out) {
  struct Result {
    std::size_t message;
    std::optional<std::size_t> call;
  };
  std::vector<Result> run;
  for (std::size_t i = begin; i < end; ++i) run.push_back({i, call_of(request.messages[i], calls)});
  // One that answers no known call leaves the others where they stand: an order made of half the
  // ids would be worse than the caller's.
  if (std::all_of(run.begin(), run.end(), [](const Result& r) { return r.call.has_value(); })) {
    std::stable_sort(run.begin(), run.end(),
                     [](const Result& a, const Result& b) { return *a.call < *b.call; });
  }
  for (std::size_t i = 0; i < run.size(); ++i) {
    const ChatMessage& message = request.messages[run[i].message];
    const std::size_t index = n_before + i;
    std::string name = run[i].call ? calls[*run[i].call].name : message.name;
    if (name.empty() && index < calls.size()) name = calls[index].name;
    if (name.empty()) {
      throw std::invalid_argument(fmt::format(
          "messages[{}].tool_call_id: \"{}\" is no call of the assistant's message before it, and "
          "the message has no name",
          run[i].message, message.tool_call_id));
    }
    out.open("message",
             {{"role", "tool"}, {"tool", std::move(name)}, {"index", std::to_string(index + 1)}});
    out.content(message.content);
    out.end_message();
  }
}

void render_messages(const ChatRequest& request, std::size_t first, Markup& out) {
  const auto& messages = request.messages;
  static const std::vector<ToolCall> kNoCalls;
  const std::vector<ToolCall>* calls = &kNoCalls;
  std::size_t n_results = 0;  // since the calls
  for (std::size_t i = 0; i < messages.size();) {
    if (messages[i].role != Speaker::kTool) {
      if (messages[i].role == Speaker::kAssistant) {
        calls = &messages[i].tool_calls;
        n_results = 0;
      }
      if (i >= first) render_spoken(messages[i], request.effort != ThinkingEffort::kOff, out);
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < messages.size() && messages[end].role == Speaker::kTool) ++end;
    if (end > first) {
      const std::size_t begin = std::max(i, first);
      render_results(request, begin, end, *calls, n_results + (begin - i), out);
    }
    n_results += end - i;
    i = end;
  }
}

void render_format(const ChatRequest& request, Markup& out) {
  if (request.response_format == ResponseFormat::kText) return;
  const bool schema = request.response_format == ResponseFormat::kJsonSchema;
  std::string body = fmt::format(kFormatNotice, schema ? "json_schema" : "json_object");
  if (schema) body += std::string(kSchemaIntro) + fenced(request.response_schema);
  out.notice("response-format", body);
}

void render_end(const ChatRequest& request, Markup& out) {
  if (request.tool_choice != ToolChoice::kAuto) {
    const bool required = request.tool_choice == ToolChoice::kRequired;
    out.notice("tool-choice", fmt::format(kToolChoiceNotice, required ? "required" : "none",
                                          required ? "call tools" : "NOT call any tools"));
  }
  render_format(request, out);
  if (!request.add_generation_prompt) return;
  out.open("message", {{"role", "assistant"}});
  out.open(request.effort == ThinkingEffort::kOff ? "response" : "think");
}

}  // namespace

ThinkingEffort parse_thinking_effort(std::string_view name) {
  if (name == "off" || name == "none") return ThinkingEffort::kOff;
  if (name == "low") return ThinkingEffort::kLow;
  if (name == "high") return ThinkingEffort::kHigh;
  if (name == "max") return ThinkingEffort::kMax;
  throw std::invalid_argument(fmt::format(
      "thinking effort \"{}\": {}expected off, low, high or max", name,
      name == "medium" ? "K3 is not invoked with it although its notice names it; " : ""));
}

std::string_view thinking_effort_name(ThinkingEffort effort) {
  switch (effort) {
    case ThinkingEffort::kOff:
      return "off";
    case ThinkingEffort::kLow:
      return "low";
    case ThinkingEffort::kHigh:
      return "high";
    case ThinkingEffort::kMax:
      return "max";
  }
  return {};
}

std::vector<TextSegment> render_chat(const ChatRequest& request) {
  Markup out;
  if (!request.tools.empty()) {
    out.notice("tool-declare", std::string(kToolsIntro) + fenced(request.tools));
  }
  if (request.effort != ThinkingEffort::kOff) {
    out.notice("thinking-effort", fmt::format(kEffortNotice, thinking_effort_name(request.effort)));
  }
  render_messages(request, 0, out);
  render_end(request, out);
  return out.take();
}

std::vector<TextSegment> render_chat_tail(const ChatRequest& request, std::size_t first) {
  Markup out;
  render_messages(request, first, out);
  render_end(request, out);
  return out.take();
}

std::string join_segments(const std::vector<TextSegment>& segments) {
  std::string out;
  for (const auto& s : segments) out += s.text;
  return out;
}

}  // namespace k3
