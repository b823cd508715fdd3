#include "rank/chat_tags.h"

#include <algorithm>

namespace k3 {
namespace {

constexpr std::array<std::string_view, 7> kTags = {"message", "think", "response", "tools",
                                                   "call",    "json",  "argument"};

std::string unescape_attribute(std::string_view value) {
  std::string out;
  while (!value.empty()) {
    if (value.starts_with("&amp;")) {
      out += '&';
      value.remove_prefix(5);
    } else if (value.starts_with("&quot;")) {
      out += '"';
      value.remove_prefix(6);
    } else {
      out += value[0];
      value.remove_prefix(1);
    }
  }
  return out;
}

std::size_t skip_name(std::string_view text, std::size_t at) {
  while (at < text.size() && ((text[at] >= 'a' && text[at] <= 'z') || text[at] == '_')) ++at;
  return at;
}

}  // namespace

std::string_view marker_text(Marker marker) {
  return kMarkers[static_cast<std::size_t>(marker)].first;
}

bool is_tag(std::string_view name) {
  return std::find(kTags.begin(), kTags.end(), name) != kTags.end();
}

bool begins_tag(std::string_view name) {
  return std::any_of(kTags.begin(), kTags.end(), [&](auto tag) { return tag.starts_with(name); });
}

const std::string* TagHead::find(std::string_view key) const {
  const auto it = std::find_if(attributes.begin(), attributes.end(),
                               [&](const auto& a) { return a.first == key; });
  return it == attributes.end() ? nullptr : &it->second;
}

TagHead scan_tag(std::string_view text) {
  // Text that never becomes a tag must not wait for ever.
  constexpr std::size_t kLongestName = 32, kLongest = 4096;
  TagHead head;
  head.n = skip_name(text, 0);
  head.name = text.substr(0, head.n);
  if (head.n > kLongestName || text.size() > kLongest) return head;
  for (;;) {
    head.is_whole = head.may_go_on = head.n == text.size();
    if (head.is_whole || head.n == 0) return head;
    const std::size_t key = std::min(text.find_first_not_of(" \n", head.n), text.size());
    if (key == head.n) return head;
    const std::size_t key_end = skip_name(text, key);
    head.may_go_on = key_end == text.size() || text.substr(key_end) == "=";
    if (head.may_go_on || key_end == key || !text.substr(key_end).starts_with("=\"")) return head;
    const std::size_t end = text.find('"', key_end + 2);
    head.may_go_on = end == text.npos;
    if (head.may_go_on) return head;
    head.attributes.emplace_back(text.substr(key, key_end - key),
                                 unescape_attribute(text.substr(key_end + 2, end - key_end - 2)));
    head.n = end + 1;
  }
}

}  // namespace k3
