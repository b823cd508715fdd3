// The tags of K3's chat markup, as rank/chat_parser.h finds them in a reply.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace k3 {

enum class Marker { kOpen, kClose, kSep, kEnd };

inline constexpr std::array<std::pair<std::string_view, Marker>, 4> kMarkers = {{
    {"<|open|>", Marker::kOpen},
    {"<|close|>", Marker::kClose},
    {"<|sep|>", Marker::kSep},
    {"<|end_of_msg|>", Marker::kEnd},
}};
std::string_view marker_text(Marker marker);

inline constexpr std::string_view kChatBlanks = " \t\r\n\f\v";
inline bool is_blank(std::string_view s) { return s.find_first_not_of(kChatBlanks) == s.npos; }

// "message", "think", "response", "tools", "call", "json", "argument".
bool is_tag(std::string_view name);
bool begins_tag(std::string_view name);  // is_tag of something that starts with `name`

// What stands between <|open|> or <|close|> and <|sep|>: a name, then key="value" pairs.
struct TagHead {
  std::string name;
  std::vector<std::pair<std::string, std::string>> attributes;  // values unescaped
  std::size_t n = 0;       // bytes read: the name and the whole pairs
  bool may_go_on = false;  // all of the text is a head or the beginning of one
  bool is_whole = false;   // all of the text is a head

  const std::string* find(std::string_view key) const;  // null: no such attribute
};
TagHead scan_tag(std::string_view text);

}  // namespace k3
