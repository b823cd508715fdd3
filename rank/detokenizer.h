// Ids to text as they come, never half a character.
#pragma once

#include <cstdint>
#include <string>

#include "rank/tokenizer.h"

namespace k3 {

struct DetokenizerOptions {
  bool skip_control = true;  // leave out every token for which Tokenizer::is_control holds
  bool raw = false;          // bytes that are not UTF-8 come out as they are; else as U+FFFD
};

// A token may end inside a character: its first bytes wait here, three at most, until the rest has
// come or cannot come any more. Without `raw` what comes out is valid UTF-8 whatever the ids; each
// maximal part of a character that never became whole is one U+FFFD. With `raw` the outputs joined
// are exactly the tokens' bytes.
class Detokenizer {
 public:
  // `tokenizer` must outlive it.
  explicit Detokenizer(const Tokenizer& tokenizer, DetokenizerOptions options = {});

  // The text that is complete with this token; may be empty. Throws std::invalid_argument for an id
  // outside the vocabulary.
  std::string push(std::int32_t id);
  // What still waits, at the end of a text. The detokenizer is then as new.
  std::string flush();

 private:
  void append(std::string_view bytes, std::string& out);

  const Tokenizer* tokenizer_;
  DetokenizerOptions options_;
  std::string pending_;  // the first bytes of one character
};

}  // namespace k3
