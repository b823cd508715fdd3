// k3run --interactive: a chat at rank 0's terminal.
#pragma once

#include <cstdint>
#include <string>

#include "apps/conversation.h"
#include "apps/generation.h"
#include "apps/terminal.h"

namespace k3 {

struct InteractiveOptions {
  std::int64_t n_predict = 0;  // tokens of a reply at most
};

struct InteractiveEnd {
  std::string reason;         // "quit" or "interrupted"
  std::int64_t n_turn = 0;    // replies
  std::int64_t n_prompt = 0;  // ids given
  std::int64_t n_token = 0;   // ids drawn
};

// Until /quit, Ctrl-D, a second Ctrl-C on an empty line, or a signal. `log` may be null.
InteractiveEnd talk(Engine& engine, const Tokenizer& tokenizer, RunLog* log, ChatRequest start,
                    Terminal& terminal, const InteractiveOptions& options);

extern const char* const kInteractiveHelp;  // the commands, a line each

}  // namespace k3
