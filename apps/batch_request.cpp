#include "apps/batch_request.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include <fmt/format.h>

#include "rank/chat_json.h"
#include "rank/json_text.h"
#include "rank/utf8.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kOptions = {"id",
                                 "custom_id",
                                 "prompt",
                                 "max_tokens",
                                 "max_completion_tokens",
                                 "temperature",
                                 "top_k",
                                 "top_p",
                                 "min_p",
                                 "repetition_penalty",
                                 "seed",
                                 "stop",
                                 "logprobs",
                                 "presence_penalty",
                                 "ignore_eos",
                                 "model",
                                 "metadata",
                                 "user"};
constexpr std::array kChatOnly = {
    "tools", "tool_choice", "response_format", "reasoning_effort", "thinking", "thinking_effort"};
constexpr std::size_t kMaxStop = 16;

struct Refused {
  const char* code;
  std::string message;
};

[[noreturn]] void refuse(std::string message) { throw Refused{"bad_request", std::move(message)}; }
[[noreturn]] void refuse(const char* key, const Json& found, const char* expected) {
  refuse(fmt::format("{}: {}, expected {}", key, describe_json(found), expected));
}

// A member that is there and not null.
const Json* find(const Json& root, const char* key) {
  const auto it = root.find(key);
  return it == root.end() || it->is_null() ? nullptr : &*it;
}

template <class T>
void read_number(const Json& root, const char* key, T& to) {
  const Json* v = find(root, key);
  if (!v) return;
  if constexpr (std::is_floating_point_v<T>) {
    if (!v->is_number()) refuse(key, *v, "a number");
    to = v->get<T>();
  } else {
    if (!v->is_number_integer()) refuse(key, *v, "a whole number");
    const bool too_large =
        v->is_number_unsigned() &&
        v->get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<T>::max());
    const bool too_small =
        !v->is_number_unsigned() &&
        (std::is_unsigned_v<T> ||
         v->get<std::int64_t>() < static_cast<std::int64_t>(std::numeric_limits<T>::min()));
    if (too_large || too_small) refuse(fmt::format("{}: {}: out of range", key, write_json(*v)));
    to = v->get<T>();
  }
}

void read_bool(const Json& root, const char* key, bool& to) {
  const Json* v = find(root, key);
  if (!v) return;
  if (!v->is_boolean()) refuse(key, *v, "true or false");
  to = v->get<bool>();
}

void read_id(const Json& root, Json& id) {
  const Json* v = find(root, "id");
  if (!v) v = find(root, "custom_id");
  if (!v) return;
  if (!v->is_string() && !v->is_number_integer()) refuse("id", *v, "a string or a whole number");
  id = *v;
}

void read_stop(const Json& root, std::vector<std::string>& stop) {
  const Json* v = find(root, "stop");
  if (!v) return;
  const Json list = v->is_string() ? Json::array({*v}) : *v;
  if (!list.is_array()) refuse("stop", *v, "a string or a list of strings");
  if (list.size() > kMaxStop)
    refuse(fmt::format("stop: {} strings, expected at most {}", list.size(), kMaxStop));
  for (const Json& s : list) {
    if (!s.is_string()) refuse("stop", s, "a string or a list of strings");
    if (s.get_ref<const std::string&>().empty())
      refuse("stop: an empty string, which is everywhere");
    stop.push_back(s.get<std::string>());
  }
}

void read_options(const Json& root, const BatchDefaults& defaults, BatchRequest& out) {
  out.n_predict = defaults.n_predict;
  out.ignore_eos = defaults.ignore_eos;
  out.sampler = defaults.sampler;
  if (out.is_chat && !defaults.predict_given) out.n_predict = defaults.n_ctx;
  read_number(root, "max_tokens", out.n_predict);
  read_number(root, "max_completion_tokens", out.n_predict);
  if (out.n_predict < 1) refuse(fmt::format("max_tokens: {}, expected 1 or more", out.n_predict));
  SamplerOptions& s = out.sampler;
  read_number(root, "temperature", s.temp);
  read_number(root, "top_k", s.top_k);
  read_number(root, "top_p", s.top_p);
  read_number(root, "min_p", s.min_p);
  read_number(root, "repetition_penalty", s.repetition_penalty);
  read_number(root, "presence_penalty", s.presence_penalty);
  read_number(root, "seed", s.seed);
  read_bool(root, "logprobs", out.logprobs);
  read_bool(root, "ignore_eos", out.ignore_eos);
  read_stop(root, out.stop);
  validate(s);
}

void check_members(const Json& root, bool is_chat) {
  for (const auto& item : root.items()) {
    const auto is_one_of = [&](const auto& list) {
      return std::find(list.begin(), list.end(), item.key()) != list.end();
    };
    if (is_one_of(kOptions) || (is_chat && item.key() == "messages")) continue;
    if (is_one_of(kChatOnly)) {
      if (is_chat) continue;
      refuse(item.key() + ": only with messages");
    }
    refuse(item.key() + ": unknown member");
  }
}

std::vector<std::int32_t> prompt_ids(const Json& root, std::string_view line,
                                     const BatchDefaults& defaults, const Tokenizer& tokenizer,
                                     BatchRequest& out) {
  if (!out.is_chat) {
    const Json& prompt = root.at("prompt");
    if (!prompt.is_string()) refuse("prompt", prompt, "a string");
    const std::vector<std::int32_t> ids =
        tokenizer.encode(prompt.get_ref<const std::string&>(),
                         defaults.control_tokens ? ControlText::kRecognised : ControlText::kAsText);
    if (ids.empty()) refuse("prompt: is empty");
    std::vector<std::int32_t> all = defaults.before;
    all.insert(all.end(), ids.begin(), ids.end());
    return all;
  }
  ChatRequest chat = parse_chat_json(line, "messages").request;
  if (defaults.effort && !find(root, "reasoning_effort") && !find(root, "thinking_effort") &&
      !find(root, "thinking")) {
    chat.effort = *defaults.effort;
  }
  out.thinking = chat.effort != ThinkingEffort::kOff;
  return tokenizer.encode_segments(render_chat(chat));
}

// The shape of files made for hosted batch services: {"custom_id", "method", "url", "body": the request}. `root` and `text` become
// the body's.
void unwrap(Json& root, std::string& text) {
  const Json* body = find(root, "body");
  if (!body) return;
  if (!body->is_object()) refuse("body", *body, "an object");
  for (const auto& item : root.items()) {
    if (item.key() == "url") {
      const bool known =
          item.value() == "/v1/chat/completions" || item.value() == "/v1/completions";
      if (!known) refuse("url: expected /v1/chat/completions or /v1/completions");
    } else if (item.key() == "method") {
      if (item.value() != "POST") refuse("method: expected POST");
    } else if (item.key() != "id" && item.key() != "custom_id" && item.key() != "body") {
      refuse(item.key() + ": unknown member beside body");
    }
  }
  const Json inner = *body;
  if (inner.contains("id") || inner.contains("custom_id") || inner.contains("body"))
    refuse("body: holds an id or a body");
  root = inner;
  text = write_json(root);
}

void read_line(const InputLine& line, const BatchDefaults& defaults, const Tokenizer& tokenizer,
               BatchRequest& out) {
  if (line.too_long) throw Refused{"line_too_long", "the line is longer than 64 MiB"};
  for (std::string_view rest = line.text; !rest.empty();) {
    const Utf8Scan scan = utf8_scan(rest);
    if (scan.kind != Utf8Scan::Kind::kWhole) {
      throw Refused{"bad_json",
                    fmt::format("byte {} is not UTF-8", line.text.size() - rest.size() + 1)};
    }
    rest.remove_prefix(scan.n);
  }
  Json root;
  try {
    root = read_json(line.text);
  } catch (const std::invalid_argument& e) {
    throw Refused{"bad_json", e.what()};
  }
  if (!root.is_object()) {
    throw Refused{"not_an_object",
                  describe_json(root) + ", expected an object with prompt or messages"};
  }
  read_id(root, out.id);
  std::string text = line.text;
  unwrap(root, text);
  out.is_chat = find(root, "messages") != nullptr;
  if (out.is_chat == (find(root, "prompt") != nullptr)) {
    refuse(out.is_chat ? "prompt, messages: expected one of the two"
                       : "neither prompt nor messages");
  }
  check_members(root, out.is_chat);
  read_options(root, defaults, out);
  out.ids = prompt_ids(root, text, defaults, tokenizer, out);
  if (out.ids.empty()) refuse("prompt: is empty");
  if (std::ssize(out.ids) > defaults.n_ctx) {
    throw Refused{"prompt_too_long", fmt::format("the prompt has {} tokens, --ctx is {}",
                                                 out.ids.size(), defaults.n_ctx)};
  }
}

}  // namespace

BatchRequest read_batch_request(const InputLine& line, const BatchDefaults& defaults,
                                const Tokenizer& tokenizer) {
  BatchRequest out;
  out.line = line.number;
  out.hash = line.hash;
  try {
    read_line(line, defaults, tokenizer, out);
  } catch (const Refused& e) {
    out.error = {e.code, e.message};
  } catch (const std::invalid_argument& e) {
    out.error = {"bad_request", e.what()};
  }
  if (out.error) out.ids.clear();
  return out;
}

}  // namespace k3
