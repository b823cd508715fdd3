// The loop around Engine::extend: ids in, tokens out, until something ends the text.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "rank/chat_parser.h"
#include "rank/engine.h"
#include "rank/run_log.h"
#include "rank/tokenizer.h"

namespace k3 {

struct Generation {
  enum class Ending {
    kEndToken,     // of the file, [EOS] or <|end_of_msg|>
    kSink,         // the sink had enough
    kLength,       // n_predict tokens
    kContextFull,  // no position left
    kStopped,      // asked to, between two tokens or two chunks of the prompt
  };
  Ending ending = Ending::kLength;
  bool prompt_read = false;       // false: stopped inside the prompt; nothing was drawn
  std::vector<std::int32_t> ids;  // drawn; the last one has not been read by the model
  double ttft_s = 0;              // from the ids to the first token
  double later_s = 0;             // all tokens after the first
  std::int64_t n_later() const { return ids.empty() ? 0 : std::ssize(ids) - 1; }
};

struct GenerationOptions {
  std::int64_t n_predict = 0;  // 0: the prompt is read, nothing is kept
  bool ignore_eos = false;
  std::uint64_t first_draw = 0;  // number of the first token within the sequence
};

// Slot 0 of an engine, on rank 0.
class Generator {
 public:
  // Whether the text must go on (false: it ends with this token). `ends`: the token is an end token.
  using Sink = std::function<bool(const Decision&, bool ends)>;

  // All must outlive it; `log` may be null.
  Generator(Engine& engine, const Tokenizer& tokenizer, RunLog* log)
      : engine_(engine), tokenizer_(tokenizer), log_(log) {}

  // Appends `prompt` and draws. `progress` sees the prompt being read; `stopped` is asked after each token and each chunk
  // of the prompt.
  Generation run(std::span<const std::int32_t> prompt, const GenerationOptions& options,
                 const Sink& sink, const ProgressFn& progress,
                 const std::function<bool()>& stopped);

 private:
  void log_steps(RunLog::Phase phase);

  Engine& engine_;
  const Tokenizer& tokenizer_;
  RunLog* log_;
  std::size_t n_logged_ = 0;  // of the engine's steps
};

// Whether a token drawn for a reply is part of it. Not so: an end token other than <|end_of_msg|>, which would leave the
// message open, and whatever else comes behind the end of the message.
bool belongs_to_reply(const ReplyParser& parser, const Tokenizer& tokenizer, std::int32_t id,
                      bool ends);

FinishReason finish_reason(Generation::Ending ending);

}  // namespace k3
