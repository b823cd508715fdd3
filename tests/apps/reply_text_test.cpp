#include "apps/reply_text.h"

#include <doctest/doctest.h>

#include <string>

using namespace k3;

namespace {

// What a reply looks like that comes in pieces of `n` bytes.
std::string shown(const std::string& reply, bool thinking, std::size_t n) {
  ReplyParser parser(thinking);
  ReplyText text;
  std::string out;
  for (std::size_t at = 0; at < reply.size(); at += n) {
    out += text.push(parser.push_text(reply.substr(at, n)));
  }
  out += text.push(parser.finish(FinishReason::kStop));
  return out + text.end();
}

}  // namespace

TEST_CASE("an answer that nothing stands before has no heading") {
  CHECK(shown("Rome.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", false, 1) ==
        "Rome.\n");
  CHECK(shown("", false, 1).empty());
}

TEST_CASE("thinking, answer and calls stand under headings, however the reply is cut") {
  const std::string reply =
      "Hm.\n<|close|>think<|sep|><|open|>response<|sep|>Let me see.<|close|>response<|sep|>"
      "<|open|>tools<|sep|><|open|>call tool=\"get_time\" index=\"1\"<|sep|>"
      "<|open|>argument key=\"tz\" type=\"string\"<|sep|>Asia/Tokyo<|close|>argument<|sep|>"
      "<|close|>call<|sep|><|open|>call tool=\"f\" index=\"2\"<|sep|><|close|>call<|sep|>"
      "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>";
  for (std::size_t n = 1; n <= reply.size(); ++n) {
    CHECK(shown(reply, true, n) ==
          "[thinking]\nHm.\n[answer]\nLet me see.\n[call get_time] {\"tz\": \"Asia/Tokyo\"}\n"
          "[call f] {}\n");
  }
}

TEST_CASE("nothing that a model writes moves the cursor") {
  CHECK(for_terminal("a\tb\né 東") == "a\tb\né 東");
  CHECK(for_terminal("\x1b[2J") == "\xef\xbf\xbd[2J");
  CHECK(for_terminal("a\rb\x7f") ==
        "a\xef\xbf\xbd"
        "b\xef\xbf\xbd");
  CHECK(for_terminal("\xc2\x9b"
                     "31m") ==
        "\xef\xbf\xbd"
        "31m");  // the one-byte CSI
}
