// What K3 writes, taken apart while it comes: reasoning, answer, calls of tools.
//
// A reply is, as meant,
//   REASONING<|close|>think<|sep|><|open|>response<|sep|>ANSWER<|close|>response<|sep|>
//   [<|open|>tools<|sep|>CALLS<|close|>tools<|sep|>]<|close|>message<|sep|><|end_of_msg|>
// where a call is
//   <|open|>call tool="NAME" index="1"<|sep|>ARGUMENTS<|close|>call<|sep|>
// and an argument <|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>, or all
// of them <|open|>json type="object"<|sep|>JSON<|close|>json<|sep|>.
// What the model really writes departs from it, and is read so:
//   - a section that opens closes whatever was open (thinking never closed);
//   - closing the message or the tools closes all inside (response, call or argument never closed);
//   - <|close|><|sep|> closes the innermost; a closing tag needs no <|sep|>;
//   - text between sections is answer, unless it is blank; text inside a call that has no argument
//     is the call's arguments;
//   - an argument that is not the JSON its type promises becomes a string;
//   - a tag of another name is left out, and its content stands where it stood.
// Nothing after the end of the message counts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rank/chat.h"
#include "rank/tokenizer.h"

namespace k3 {

enum class FinishReason {
  kStop,
  kLength,       // the budget ended before the reply did, be it inside the thinking
  kToolCalls,    // a whole reply that calls tools
  kInterrupted,  // somebody stopped it
};
std::string_view finish_reason_name(FinishReason reason);  // "stop", "length", "tool_calls", ...

struct ReplyEvent {
  enum class Kind {
    kReasoning,      // text: the next piece
    kAnswer,         // text: the next piece
    kCallStart,      // text: the tool's name
    kCallArguments,  // text: the next piece of the call's JSON
    kCallEnd,
    kFinish,  // text: finish_reason_name
  };
  Kind kind;
  std::string text;      // valid UTF-8: an incomplete character waits, a broken one is U+FFFD
  std::size_t call = 0;  // of the three about calls: index in ParsedReply::tool_calls
  bool operator==(const ReplyEvent&) const = default;
};

struct ParsedCall {
  std::string name;
  int index = 0;                    // as the model numbered it, from 1; its place where it did not
  std::string arguments;            // JSON object; or what stands in a json block, unchecked
  bool is_json = false;             // `arguments` is a JSON object
  bool complete = false;            // false: the reply ended inside the call
  std::string raw;                  // as the model wrote it, tags included
  std::vector<ToolArgument> typed;  // what `arguments` was made of
  std::optional<std::string> json_block;  // instead of `typed`
};

// The pieces in the events, joined, are these strings.
struct ParsedReply {
  std::string reasoning;
  std::string answer;
  std::vector<ParsedCall> tool_calls;
  FinishReason finish_reason = FinishReason::kLength;
  std::string raw;  // all that was pushed up to the end of the message
};

class ReplyParser {
 public:
  // Where the prompt ended: inside the reply's thinking, or its response (ThinkingEffort::kOff).
  explicit ReplyParser(bool thinking);
  ~ReplyParser();
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;

  // The next token, with the events that it completes. Only control tokens are markup: what merely
  // spells one is text. Control tokens that are none of the markup's are left out; [EOS] ends the
  // reply as <|end_of_msg|> does.
  std::vector<ReplyEvent> push(std::string_view bytes, bool is_control);
  std::vector<ReplyEvent> push(const Tokenizer& tokenizer, std::int32_t id);
  // The same where only text is to be had: what spells a marker is one, and the beginning of a
  // marker waits until it is known to be none. <|open|> or <|close|> that no tag can follow, and
  // <|sep|> by itself, are text.
  std::vector<ReplyEvent> push_text(std::string_view bytes);

  // The end of the generation, once. `why`: kStop (a stop token, whether it was pushed or not),
  // kLength or kInterrupted; a message that is already closed has stopped whatever `why` says, and
  // one with calls becomes kToolCalls. After kLength and kInterrupted an open call stays as far as
  // it came.
  std::vector<ReplyEvent> finish(FinishReason why);

  // True from the end of the message, or from finish(), on: nothing pushed counts any more.
  bool done() const;
  // What is known so far; whole after finish().
  const ParsedReply& reply() const;
  // The markup that closes whatever is open now (at finish(), when that has been), up to
  // <|end_of_msg|>: to be read after a reply that broke off, so that the next message stands on a
  // closed one. Empty once <|end_of_msg|> was pushed.
  std::vector<TextSegment> closing() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The reply as the conversation's next message.
ChatMessage to_message(const ParsedReply& reply);

}  // namespace k3
