// k3run's and k3batch's options about a stored sequence: a long prompt read once, questions asked many times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "apps/options.h"

namespace k3 {

struct SessionOptions {
  std::string load;  // --session; empty: none
  std::string save;  // --save-session
};

// What of a prompt is left to be read behind a session, and what the session has read; both before anything is loaded.
struct SessionPrompt {
  std::vector<std::int32_t> before;
  std::vector<std::int32_t> ids;
};

// `path`'s ids. Throws std::invalid_argument: no session, of another model, no room for one more in n_ctx.
std::vector<std::int32_t> session_ids(const std::string& path, const std::string& fingerprint,
                                      std::int64_t n_ctx);

// A raw prompt goes on where the session ends. A chat's ids are the whole conversation, which must begin with all that
// the session has read and go on after it: throws std::invalid_argument naming `where` and the first place where they differ.
SessionPrompt after_session(std::vector<std::int32_t> before, std::vector<std::int32_t> prompt,
                            bool is_chat, const std::string& where, const std::string& path);

}  // namespace k3
