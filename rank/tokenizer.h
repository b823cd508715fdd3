// Text to ids and back, with the vocabulary of the GGUF file itself.
//
// encode: the text is cut into pieces (rank/pretokenizer.h) and each piece is joined by rank: a
// piece that is a token is that token; otherwise its bytes are joined pairwise, always the adjacent
// pair whose concatenation is the token of lowest id, leftmost on ties, until no pair is a token.
// `tokenizer.ggml.merges` is not needed for that and not read. Source: the published K2/K3
// tokenizer (a tiktoken vocabulary): ids are the ranks of its merges.
//
// Lossless: every string of bytes, valid UTF-8 or not, encodes to ids that decode to the same
// bytes. A byte that is not part of a valid UTF-8 character is a piece of its own. Nothing is added
// in front or behind (the reference adds no BOS).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace k3 {

class Metadata;  // loader/gguf.h

// Values of tokenizer.ggml.token_type.
enum class TokenType : std::int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5
};

// The vocabulary as a file spells it.
struct Vocab {
  // Normal tokens in GPT-2's byte alphabet, all others literally; the index is the id.
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;  // TokenType of each token
  std::optional<std::int32_t> bos, eos, pad;
  std::string model;  // "gpt2"
  std::string pre;    // "kimi-k2"
};

// Reads tokenizer.ggml.*. Throws std::invalid_argument naming `file` and the key when one is
// missing (model, pre, tokens, token_type), of another type or length, or holds a model or
// pre-tokenizer that is not implemented.
Vocab read_vocab(const Metadata& meta, const std::string& file);

// What a control token's spelling in the text means.
enum class ControlText {
  kAsText,      // ordinary characters: what a user typed
  kRecognised,  // the control token: markup
};

// A stretch of text whose pieces never join with those of its neighbours.
struct TextSegment {
  std::string text;
  bool is_markup = false;  // control tokens are recognised here, and nowhere else
};

class Tokenizer {
 public:
  // Throws std::invalid_argument naming what is wrong with the vocabulary: a model or pre-tokenizer
  // not implemented, lists of different length, a type that is not in TokenType, a normal token
  // outside the byte alphabet, a byte without a token, a bos/eos/pad id outside the vocabulary.
  explicit Tokenizer(Vocab vocab);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Safe to call from several threads at once.
  std::vector<std::int32_t> encode(std::string_view text, ControlText control) const;
  std::vector<std::int32_t> encode_segments(std::span<const TextSegment> segments) const;

  // The bytes of the ids; control tokens as they are spelled. Throws std::invalid_argument naming
  // an id outside the vocabulary and the vocabulary's size.
  std::string decode(std::span<const std::int32_t> ids) const;
  // The bytes of one token; valid as long as the tokenizer. Throws likewise.
  const std::string& bytes(std::int32_t id) const;
  // True for every token that is not ordinary text: control, user-defined, unknown, unused,
  // reserved. Decided by the token's type alone; K3's own "special" flags are not in the file and
  // leave out the tags of its markup.
  bool is_control(std::int32_t id) const;
  // The control or user-defined token spelled so.
  std::optional<std::int32_t> find_control(std::string_view spelling) const;

  std::int32_t n_vocab() const;
  const Vocab& vocab() const;  // `tokens` as the file spells them

  // Ids that end a generation: the file's eos, and the tokens spelled [EOS] and <|end_of_msg|>
  // where there are any. Ascending.
  const std::vector<std::int32_t>& stop_ids() const;
  bool is_stop(std::int32_t id) const;
  // One line each: an eos that names [EOS] only (a converter's mistake), or no stop token at all.
  const std::vector<std::string>& warnings() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
