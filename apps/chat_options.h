// k3run's options about a chat, and the request that they make.
#pragma once

#include <string>
#include <vector>

#include "apps/options.h"
#include "rank/chat.h"
#include "rank/run_log.h"

namespace k3 {

enum class ReplyOutput { kText, kJson, kRaw };

struct ChatOptions {
  std::string file;  // --chat
  std::string user;
  std::string system;
  std::string effort;  // empty: the file's, else max
  ReplyOutput output = ReplyOutput::kText;
  bool interactive = false;
};

void add_chat_options(Options& options, ChatOptions& chat);

// Any of them is on the line.
bool wants_chat(const Options& options);

// Throws std::invalid_argument naming two options that do not go together.
void check_chat_options(const Options& options, const ChatOptions& chat);

// Messages and settings from the file and the line; names of members that have no effect go to `ignored`. Throws
// std::invalid_argument naming the file or option, and what is wrong.
ChatRequest read_chat_request(const Options& options, const ChatOptions& chat,
                              std::vector<std::string>& ignored);

// The options that were given, for the log and the line at the start.
NamedTexts describe(const Options& options, const ChatOptions& chat);

}  // namespace k3
