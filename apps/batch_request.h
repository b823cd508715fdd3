// One line of a batch's input: what is asked.
//
//   {"id": "a1", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
//   {"id": "a2", "messages": [{"role": "user", "content": "Hello"}], "seed": 7, "stop": ["\n\n"]}
//
//   {"custom_id": "a3", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
//
// Members: id or custom_id (a string or an integer; may be absent); prompt, or messages with what else rank/chat_json.h reads;
// max_tokens or max_completion_tokens, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, seed, stop (a
// string or a list of up to 16), logprobs and ignore_eos (booleans). model, metadata and user have no effect. Any other member
// is an error: a misspelt option that is passed over in silence costs a night.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "apps/batch_lines.h"
#include "rank/chat.h"
#include "rank/sampler.h"
#include "rank/tokenizer.h"

namespace k3 {

// What a line that does not say otherwise gets, and what holds for all.
struct BatchDefaults {
  SamplerOptions sampler;
  std::int64_t n_predict = 128;
  bool predict_given = false;  // else a chat's reply gets what the context has room for
  bool ignore_eos = false;
  bool control_tokens = false;
  std::vector<std::int32_t> before;      // ids that a raw prompt goes on after
  std::optional<ThinkingEffort> effort;  // where a chat names none
  std::int64_t n_ctx = 0;
  std::int64_t n_vocab = 0;
};

struct LineError {
  std::string code;  // bad_json, not_an_object, bad_request, line_too_long, prompt_too_long
  std::string message;
};

struct BatchRequest {
  std::int64_t line = 0;
  std::uint64_t hash = 0;
  nlohmann::ordered_json id;  // null where none can be read
  std::optional<LineError> error;
  // the rest holds where there is no error
  bool is_chat = false;
  bool thinking = false;  // chat: the prompt ends inside the reply's thinking
  std::vector<std::int32_t> ids;
  std::int64_t n_predict = 0;
  bool ignore_eos = false;
  bool logprobs = false;
  std::vector<std::string> stop;
  SamplerOptions sampler;
};

// Never throws for what a line says: that is `error`.
BatchRequest read_batch_request(const InputLine& line, const BatchDefaults& defaults,
                                const Tokenizer& tokenizer);

}  // namespace k3
