// UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing past U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace k3 {

struct Utf8Scan {
  enum class Kind {
    kWhole,   // n bytes are a character
    kBroken,  // n bytes begin a character that the next byte does not continue, or one byte none
    kCut,     // n bytes, all there is, begin a character
  };
  Kind kind;
  std::size_t n;        // 1 to 4
  char32_t code_point;  // of a whole character, else 0
};

// What `text`, which is not empty, starts with. The broken beginnings are Unicode's "maximal
// subparts": a decoder that puts one U+FFFD for each agrees with most others.
inline Utf8Scan utf8_scan(std::string_view text) {
  using Kind = Utf8Scan::Kind;
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return {Kind::kWhole, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Kind::kBroken, 1, 0};
  const std::size_t len = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // Only the second byte's range depends on the lead: that is where overlong forms and surrogates
  // are kept out.
  std::uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  std::uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  char32_t c = lead & (0x7fu >> len);
  for (std::size_t i = 1; i < len; ++i) {
    if (i == text.size()) return {Kind::kCut, i, 0};
    if (byte(i) < low || byte(i) > high) return {Kind::kBroken, i, 0};
    c = (c << 6) | (byte(i) & 0x3fu);
    low = 0x80;
    high = 0xbf;
  }
  return {Kind::kWhole, len, c};
}

}  // namespace k3
