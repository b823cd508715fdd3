#include "apps/batch_answer.h"

#include <algorithm>

#include <fmt/format.h>

#include "apps/generation.h"
#include "rank/chat_json.h"
#include "rank/json_text.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

Json head(const BatchRequest& request) {
  return {{"id", request.id},
          {"line", request.line},
          {"line_hash", fmt::format("{:016x}", request.hash)}};
}

double ms(double seconds) {
  return static_cast<double>(static_cast<std::int64_t>(1e6 * seconds)) / 1e3;
}

}  // namespace

BatchAnswer::BatchAnswer(const BatchRequest& request, const Tokenizer& tokenizer)
    : request_(&request),
      tokenizer_(&tokenizer),
      detokenizer_(tokenizer, {.skip_control = true, .raw = false}) {
  if (request.is_chat) parser_.emplace(request.thinking);
}

// Text only grows at its end, so what was searched before need not be again but for a stop string's beginning.
bool BatchAnswer::found_stop(const std::string& text) {
  std::size_t first = std::string::npos;
  std::size_t longest = 1;
  for (const std::string& s : request_->stop) {
    longest = std::max(longest, s.size());
    const std::size_t at = text.find(s, searched_);
    if (at < first) {
      first = at;
      stop_ = s;
    }
  }
  searched_ = text.size() >= longest ? text.size() - longest + 1 : 0;
  if (first == std::string::npos) return false;
  searched_ = first;
  return true;
}

void BatchAnswer::finish(FinishReason why) {
  if (parser_) {
    parser_->finish(why);
    if (!stop_) text_ = parser_->reply().answer;
    finish_reason_ = finish_reason_name(parser_->reply().finish_reason);
    return;
  }
  if (!stop_) text_ += detokenizer_.flush();
  finish_reason_ = finish_reason_name(why);
}

bool BatchAnswer::push(const Decision& token) {
  ids_.push_back(token.id);
  if (request_->logprobs) logprobs_.push_back(token.logprob);
  const bool ends = tokenizer_->is_stop(token.id) && (parser_ || !request_->ignore_eos);
  bool goes_on = !ends;
  if (parser_) {
    if (belongs_to_reply(*parser_, *tokenizer_, token.id, ends)) {
      parser_->push(*tokenizer_, token.id);
    } else {
      goes_on = false;
    }
  } else if (!ends) {
    text_ += detokenizer_.push(token.id);
  }
  const std::string& text = parser_ ? parser_->reply().answer : text_;
  if (found_stop(text)) {
    text_ = text.substr(0, searched_);
    goes_on = false;
  }
  if (!goes_on) {
    finish(FinishReason::kStop);
    return false;
  }
  if (std::ssize(ids_) < request_->n_predict) return true;
  cut_off();
  return false;
}

void BatchAnswer::cut_off() { finish(FinishReason::kLength); }

std::string BatchAnswer::line(const AnswerTimes& times) const {
  Json j = head(*request_);
  j["text"] = text_;
  if (parser_) {
    j["message"] = read_json(write_reply_json(parser_->reply()))["message"];
    j["message"]["content"] = text_;
  }
  j["finish_reason"] = finish_reason_;
  if (stop_) j["stop"] = *stop_;
  j["ids"] = ids_;
  if (request_->logprobs) j["logprobs"] = logprobs_;
  const auto n_token = std::ssize(ids_);
  j["usage"] = {{"prompt_tokens", request_->ids.size()}, {"completion_tokens", n_token}};
  j["timings"] = {{"queue_ms", ms(times.queue_s)}, {"ttft_ms", ms(times.ttft_s)}};
  j["timings"]["reused_tokens"] = times.n_reused;
  if (n_token > 1) j["timings"]["tpot_ms"] = ms(times.later_s / static_cast<double>(n_token - 1));
  return write_json(j);
}

std::string error_line(const BatchRequest& request) {
  Json j = head(request);
  j["error"] = {{"code", request.error->code}, {"message", request.error->message}};
  return write_json(j);
}

}  // namespace k3
