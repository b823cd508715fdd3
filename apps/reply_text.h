// A reply as text for people: the events of a ReplyParser in, text out as they come.
//
//   [thinking]
//   The user asks for a capital.
//   [answer]
//   Rome.
//   [call get_time] {"tz": "Asia/Tokyo"}
//
// Parts that are not there have no heading, and an answer that nothing stands before has none either: with thinking off the
// text is the answer alone.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rank/chat_parser.h"

namespace k3 {

class ReplyText {
 public:
  std::string push(const std::vector<ReplyEvent>& events);
  // A line end where the text has none.
  std::string end();

 private:
  enum class Part { kNone, kThinking, kAnswer, kCall };
  void enter(Part part, std::string_view heading);
  void add(std::string_view text);

  std::string out_;
  Part part_ = Part::kNone;
  bool line_open_ = false;
};

// What a terminal may be shown of text that a model wrote: line ends and tabs as they are, any other control character as
// U+FFFD, so that none of them moves the cursor or changes a setting. `text`: whole UTF-8 characters.
std::string for_terminal(std::string_view text);

}  // namespace k3
