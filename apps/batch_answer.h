// One answer of a batch while it comes, and the line that it becomes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/batch_request.h"
#include "rank/chat_parser.h"
#include "rank/detokenizer.h"
#include "rank/sampler.h"

namespace k3 {

struct AnswerTimes {
  double queue_s = 0;         // from the line being read to its first step
  double ttft_s = 0;          // from there to the first token
  double later_s = 0;         // all tokens after the first
  std::int64_t n_reused = 0;  // prompt tokens that another request had read already
};

class BatchAnswer {
 public:
  // Both must outlive it.
  BatchAnswer(const BatchRequest& request, const Tokenizer& tokenizer);

  // The next token drawn. False: the answer ends with it (an end token, a stop string, the end of the message,
  // max_tokens).
  bool push(const Decision& token);
  // Ends it for want of positions.
  void cut_off();

  const std::vector<std::int32_t>& ids() const { return ids_; }
  const std::string& finish_reason() const { return finish_reason_; }
  // The output's line, once it has ended.
  std::string line(const AnswerTimes& times) const;

 private:
  bool found_stop(const std::string& text);
  void finish(FinishReason why);

  const BatchRequest* request_;
  const Tokenizer* tokenizer_;
  Detokenizer detokenizer_;
  std::optional<ReplyParser> parser_;  // a chat
  std::string text_;
  std::size_t searched_ = 0;  // no stop string begins before this
  std::optional<std::string> stop_;
  std::vector<std::int32_t> ids_;
  std::vector<double> logprobs_;
  std::string finish_reason_;
};

// The output's line for a request with an error.
std::string error_line(const BatchRequest& request);

}  // namespace k3
