// Conversations in the OpenAI chat format, in and out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rank/chat.h"
#include "rank/chat_parser.h"

namespace k3 {

enum class ImageParts {
  kRefuse,
  kPlaceholder,  // stand in the markup where the image's embeddings would
};

struct ChatFile {
  ChatRequest request;
  // Members of the request that are not about its text (model, temperature, ...), so that a caller
  // can say that they have no effect.
  std::vector<std::string> ignored;
};

// A request, or its list of messages alone. Read are: messages (role system, developer, user,
// assistant, tool; content, name, reasoning_content or reasoning, tool_calls, tool_call_id, and
// tools in a system message), tools, tool_choice (auto, required, none), response_format,
// reasoning_effort or thinking_effort (off, low, high, max), thinking (a boolean, or an object with
// type and effort), add_generation_prompt.
// Throws std::invalid_argument, one line that begins with `source`: not JSON, with line and column;
// else the message's index and the field, what was found and what was expected.
ChatFile parse_chat_json(std::string_view text, const std::string& source,
                         ImageParts images = ImageParts::kRefuse);

// The reply as one line of JSON: {"message": {role, content, reasoning_content, tool_calls},
// "finish_reason": ...}. The message can stand in a request's messages: the calls have the ids
// call_1, call_2, ... `first_call` is the number of the first, for replies later in a conversation.
std::string write_reply_json(const ParsedReply& reply, int first_call = 1);

}  // namespace k3
