#include "apps/chat_options.h"

#include <array>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/job.h"
#include "rank/chat_json.h"

namespace k3 {
namespace {

const std::array<const char*, 3> kOutputs = {"text", "json", "raw"};

}  // namespace

void add_chat_options(Options& o, ChatOptions& c) {
  o.group("Chat");
  o.text("--chat", "FILE.json", c.file,
         "Replies to a conversation in the OpenAI chat format: messages, tools, tool_choice, "
         "response_format, reasoning_effort; -: standard input.");
  o.text("--chat-user", "TEXT", c.user,
         "Replies to TEXT; with --chat it is the conversation's next message.");
  o.text("--system", "TEXT", c.system, "A system message before it; not with --chat.");
  o.choice(
      "--thinking-effort", {"off", "low", "high", "max"}, 3,
      [&c](std::size_t i) {
        c.effort = std::array<const char*, 4>{"off", "low", "high", "max"}[i];
      },
      "How much the model thinks before it answers. [default: the file's, else max]");
  o.choice(
      "--output", {"text", "json", "raw"}, 0,
      [&c](std::size_t i) { c.output = static_cast<ReplyOutput>(i); },
      "text: thinking, answer and calls under headings, as they come; json: one object at the end; "
      "raw: the model's own markup.");
  o.flag("--interactive", c.interactive,
         "Talks at rank 0's terminal; --chat, --chat-user and --system are the beginning.");
}

bool wants_chat(const Options& o) {
  return o.given("--chat") || o.given("--chat-user") || o.given("--interactive");
}

void check_chat_options(const Options& o, const ChatOptions& c) {
  const auto refuse = [](const char* option, const char* why) {
    throw std::invalid_argument(std::string(option) + ": " + why);
  };
  if (!wants_chat(o)) {
    for (const char* option : {"--system", "--thinking-effort", "--output"}) {
      if (o.given(option)) refuse(option, "only with --chat, --chat-user or --interactive");
    }
    return;
  }
  for (const char* option : {"--prompt", "--prompt-file"}) {
    if (o.given(option)) refuse(option, "a prompt is used as it is; a chat takes --chat-user");
  }
  if (o.given("--control-tokens")) {
    refuse("--control-tokens", "not in a chat: what is typed stays text; see --output raw");
  }
  if (o.given("--ignore-eos")) refuse("--ignore-eos", "not in a chat: a message has an end");
  if (o.given("--system") && o.given("--chat")) {
    refuse("--system", "not with --chat: it belongs into the file's messages");
  }
  if (c.interactive && c.output != ReplyOutput::kText) {
    refuse("--output", "a terminal shows text; json and raw are for one reply");
  }
  if (c.interactive && c.file == "-") refuse("--chat -", "standard input brings the keys");
}

ChatRequest read_chat_request(const Options& o, const ChatOptions& c,
                              std::vector<std::string>& ignored) {
  ChatRequest request;
  if (o.given("--chat")) {
    const std::string where = c.file == "-" ? "standard input" : c.file;
    ChatFile file = parse_chat_json(read_text(c.file), where);
    request = std::move(file.request);
    ignored = std::move(file.ignored);
    if (!request.add_generation_prompt) {
      throw std::invalid_argument(where +
                                  ": add_generation_prompt: false, expected true: a reply "
                                  "is to be generated");
    }
  }
  const auto say = [&](Speaker role, const std::string& text) {
    ChatMessage m;
    m.role = role;
    m.content.push_back({text});
    request.messages.push_back(std::move(m));
  };
  if (o.given("--system")) say(Speaker::kSystem, c.system);
  if (o.given("--chat-user")) say(Speaker::kUser, c.user);
  if (!c.effort.empty()) request.effort = parse_thinking_effort(c.effort);
  return request;
}

NamedTexts describe(const Options& o, const ChatOptions& c) {
  NamedTexts out;
  const auto add = [&](const char* option, const std::string& value) {
    if (o.given(option)) out.emplace_back(option + 2, value);
  };
  add("--chat", c.file);
  add("--chat-user", c.user);
  add("--system", c.system);
  add("--thinking-effort", c.effort);
  add("--output", kOutputs[static_cast<std::size_t>(c.output)]);
  add("--interactive", "yes");
  return out;
}

}  // namespace k3
