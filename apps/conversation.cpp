#include "apps/conversation.h"

#include <algorithm>
#include <utility>

namespace k3 {

Conversation::Conversation(const Tokenizer& tokenizer, ChatRequest start)
    : tokenizer_(&tokenizer), request_(std::move(start)) {}

bool Conversation::waits_for_reply() const {
  if (request_.messages.empty() || !calls_waiting().empty()) return false;
  const Speaker last = request_.messages.back().role;
  return last == Speaker::kUser || last == Speaker::kTool;
}

std::vector<ToolCall> Conversation::calls_waiting() const {
  const auto& messages = request_.messages;
  std::size_t n_result = 0;
  while (n_result < messages.size() &&
         messages[messages.size() - 1 - n_result].role == Speaker::kTool) {
    ++n_result;
  }
  if (n_result == messages.size()) return {};
  const std::vector<ToolCall>& calls = messages[messages.size() - 1 - n_result].tool_calls;
  if (n_result >= calls.size()) return {};
  return {calls.begin() + static_cast<std::ptrdiff_t>(n_result), calls.end()};
}

void Conversation::say(std::string text) {
  ChatMessage m;
  m.role = Speaker::kUser;
  m.content.push_back({std::move(text)});
  request_.messages.push_back(std::move(m));
}

void Conversation::say_result(const ToolCall& call, std::string text) {
  ChatMessage m;
  m.role = Speaker::kTool;
  m.name = call.name;
  m.tool_call_id = call.id;
  m.content.push_back({std::move(text)});
  request_.messages.push_back(std::move(m));
}

std::vector<std::int32_t> Conversation::fresh_ids() const {
  if (ids_.empty()) return tokenizer_->encode_segments(render_chat(request_));
  std::vector<std::int32_t> out = tokenizer_->encode_segments(closing_);
  const auto tail = tokenizer_->encode_segments(render_chat_tail(request_, n_read_));
  out.insert(out.end(), tail.begin(), tail.end());
  return out;
}

Conversation::Input Conversation::input() const {
  Input in;
  in.reset = slot_is_dirty_;
  const std::size_t n_fed = slot_is_dirty_ ? 0 : n_fed_;
  in.ids.assign(ids_.begin() + static_cast<std::ptrdiff_t>(n_fed), ids_.end());
  const auto fresh = fresh_ids();
  in.ids.insert(in.ids.end(), fresh.begin(), fresh.end());
  in.n_fresh = fresh.size();
  return in;
}

void Conversation::replied(const ReplyParser& parser, std::span<const std::int32_t> drawn,
                           bool last_counts) {
  const auto fresh = fresh_ids();
  ids_.insert(ids_.end(), fresh.begin(), fresh.end());
  ids_.insert(ids_.end(), drawn.begin(), drawn.end());
  n_fed_ = ids_.size() - (drawn.empty() ? 0 : 1);
  if (!drawn.empty() && !last_counts) ids_.pop_back();
  slot_is_dirty_ = false;
  ChatMessage message = to_message(parser.reply());
  for (ToolCall& call : message.tool_calls) call.id = "call_" + std::to_string(++n_call_);
  request_.messages.push_back(std::move(message));
  n_read_ = request_.messages.size();
  closing_ = parser.closing();
}

void Conversation::take_back(std::size_t from, bool slot_is_dirty) {
  request_.messages.resize(std::max(from, n_read_));
  slot_is_dirty_ = slot_is_dirty_ || slot_is_dirty;
}

void Conversation::clear() {
  const auto& m = request_.messages;
  const auto end = std::find_if(m.begin(), m.end(),
                                [](const ChatMessage& x) { return x.role != Speaker::kSystem; });
  request_.messages.resize(static_cast<std::size_t>(end - m.begin()));
  ids_.clear();
  closing_.clear();
  n_read_ = 0;
  n_fed_ = 0;
  slot_is_dirty_ = true;
}

}  // namespace k3
