#include "apps/run_session.h"

#include <stdexcept>

#include <fmt/format.h>

#include "rank/scheduler.h"
#include "rank/session_file.h"

namespace k3 {

std::vector<std::int32_t> session_ids(const std::string& path, const std::string& fingerprint,
                                      std::int64_t n_ctx) {
  const SessionHead head = read_session_head(path);
  if (head.fingerprint != fingerprint) {
    throw std::invalid_argument(
        fmt::format("--session {}: of a model with fingerprint {}, this one has {}", path,
                    head.fingerprint, fingerprint));
  }
  if (std::ssize(head.ids) >= n_ctx) {
    throw std::invalid_argument(
        fmt::format("--session {}: holds {} positions, --ctx {} has no room for one more", path,
                    head.ids.size(), n_ctx));
  }
  return head.ids;
}

SessionPrompt after_session(std::vector<std::int32_t> before, std::vector<std::int32_t> prompt,
                            bool is_chat, const std::string& where, const std::string& path) {
  if (!is_chat) return {std::move(before), std::move(prompt)};
  const std::size_t common = common_prefix(before, prompt);
  if (common < before.size() || common == prompt.size()) {
    throw std::invalid_argument(fmt::format(
        "{}: the conversation does not go on where --session {} ends: of the {} tokens that "
        "it has read, the first {} are the conversation's",
        where, path, before.size(), common));
  }
  prompt.erase(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(common));
  return {std::move(before), std::move(prompt)};
}

}  // namespace k3
