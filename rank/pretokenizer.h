// Cuts text into the pieces inside which tokens are joined: the published K2/K3 pattern, through
// PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

namespace k3 {

class Pretokenizer {
 public:
  enum class Matcher {
    kFastest,      // machine code where PCRE2 can make it, else the interpreter
    kInterpreter,  // for tests: both cut alike
  };

  // Throws std::runtime_error when the PCRE2 library cannot do what the pattern needs.
  explicit Pretokenizer(Matcher matcher = Matcher::kFastest);
  ~Pretokenizer();
  Pretokenizer(const Pretokenizer&) = delete;
  Pretokenizer& operator=(const Pretokenizer&) = delete;

  // Appends the pieces of `text`: consecutive, never empty, together the whole text. Any bytes are
  // accepted: one that is not part of a valid UTF-8 character is a piece, and the text on either
  // side of it is cut as if it stood alone. Safe to call from several threads at once.
  void cut(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Byte offsets inside `text` that no piece may span, ascending: the reference encodes 400,000
// characters at a time, and within those breaks each run of more than 25,000 characters that are
// all blank or all not. A byte that is not part of a valid UTF-8 character counts as a character.
std::vector<std::size_t> chunk_borders(std::string_view text);

}  // namespace k3
