// A chat that goes on in one slot: what has been said, and which ids the model has yet to read.
//
// The sequence stays in the slot between turns. A turn's input is the last id drawn (which nobody has read yet), the markup
// that closes the reply where it broke off, and the new messages up to the opening of the next reply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rank/chat.h"
#include "rank/chat_parser.h"
#include "rank/tokenizer.h"

namespace k3 {

class Conversation {
 public:
  // `start`: messages and settings given beforehand. `tokenizer` must outlive it.
  Conversation(const Tokenizer& tokenizer, ChatRequest start);

  const ChatRequest& request() const { return request_; }
  bool thinking() const { return request_.effort != ThinkingEffort::kOff; }
  std::size_t n_message() const { return request_.messages.size(); }
  // The last message is somebody's whom the model has not answered.
  bool waits_for_reply() const;
  // The calls of the last reply whose results have not been said yet, in their order.
  std::vector<ToolCall> calls_waiting() const;

  void say(std::string text);                               // the user
  void say_result(const ToolCall& call, std::string text);  // a tool

  struct Input {
    bool reset = false;             // the slot must be emptied first
    std::vector<std::int32_t> ids;  // then appended
    std::size_t n_fresh =
        0;  // of them at the end: what this turn brings; the ids before have been said already
  };
  // What the slot needs before the next reply can be drawn.
  Input input() const;

  // After input() was run: the reply, finished, and the ids drawn for it. `last_counts`: the last id belongs to it (an end
  // token that is not <|end_of_msg|>, or a token behind the end of the message, does not).
  void replied(const ReplyParser& parser, std::span<const std::int32_t> drawn, bool last_counts);
  // Takes back all messages from number `from` on, none of which has been answered. `slot_is_dirty`: the model has read
  // some of them, so the slot has to be filled anew.
  void take_back(std::size_t from, bool slot_is_dirty);
  // All but the system's messages at the beginning.
  void clear();

  // Ids of the conversation up to the last reply.
  std::span<const std::int32_t> ids() const { return ids_; }

 private:
  std::vector<std::int32_t> fresh_ids() const;

  const Tokenizer* tokenizer_;
  ChatRequest request_;
  std::size_t n_read_ = 0;            // messages that stand in ids_
  std::vector<std::int32_t> ids_;     // the whole sequence
  std::size_t n_fed_ = 0;             // of them in the slot
  bool slot_is_dirty_ = true;         // the slot holds something else
  std::vector<TextSegment> closing_;  // of the last reply
  int n_call_ = 0;                    // calls so far: their ids
};

}  // namespace k3
