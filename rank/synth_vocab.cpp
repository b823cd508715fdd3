// The vocabulary of synthetic models.
#include <stdexcept>
#include <string_view>
#include <unordered_map>

#include "rank/synth.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

// GPT-2's byte alphabet: printable bytes stand for themselves, the others for U+0100 and up in ascending order. Ids of
// single bytes follow the same order: printable ones first.
struct ByteAlphabet {
  std::vector<std::string> by_byte = std::vector<std::string>(256);
  std::vector<int> bytes_in_order;

  ByteAlphabet() {
    std::vector<int> others;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      (printable ? bytes_in_order : others).push_back(b);
      if (printable) by_byte[static_cast<std::size_t>(b)] = utf8(static_cast<std::uint32_t>(b));
    }
    for (std::size_t i = 0; i < others.size(); ++i) {
      by_byte[static_cast<std::size_t>(others[i])] = utf8(256 + static_cast<std::uint32_t>(i));
    }
    bytes_in_order.insert(bytes_in_order.end(), others.begin(), others.end());
  }

  static std::string utf8(std::uint32_t c) {
    if (c < 0x80) return std::string(1, static_cast<char>(c));
    return {static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 0x3f))};
  }

  std::string spell(std::string_view text) const {
    std::string out;
    for (const char ch : text) out += by_byte[static_cast<std::uint8_t>(ch)];
    return out;
  }
};

// Token texts beyond single bytes: all words of 2, 3, 4 and 5 lower-case letters in alphabetical order, each length
// also with a blank in front. So every shorter word is a token before a longer one is, which is what joining by rank needs.
class Words {
 public:
  std::string next() {
    if (at_ == count_) advance();
    std::string word(static_cast<std::size_t>(letters_), 'a');
    std::int64_t n = at_++;
    for (int i = letters_ - 1; i >= 0; --i, n /= 26) {
      word[static_cast<std::size_t>(i)] = static_cast<char>('a' + n % 26);
    }
    return blank_ ? " " + word : word;
  }

 private:
  void advance() {
    if (blank_) ++letters_;
    blank_ = !blank_;
    at_ = 0;
    count_ = 1;
    for (int i = 0; i < letters_; ++i) count_ *= 26;
  }
  int letters_ = 1;
  bool blank_ = false;
  std::int64_t at_ = 0;
  std::int64_t count_ = 0;  // the first call starts " a" .. " z": single letters are bytes already
};

// The two tokens from which joining by rank makes `text`: the pair left before the last join.
std::pair<std::string, std::string> last_pair(
    const std::string& text, const std::unordered_map<std::string, std::int64_t>& rank_of) {
  std::vector<std::string> parts;
  for (const char c : text) parts.emplace_back(1, c);
  while (parts.size() > 2) {
    std::size_t best = parts.size();
    std::int64_t lowest = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = rank_of.find(parts[i] + parts[i + 1]);
      if (it != rank_of.end() && (best == parts.size() || it->second < lowest)) {
        best = i;
        lowest = it->second;
      }
    }
    if (best == parts.size()) throw std::logic_error("a merge without two parts");
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  return {parts.at(0), parts.at(1)};
}

struct ControlToken {
  int from_start;  // of the control tokens; negative: from their end
  const char* text;
};
constexpr ControlToken kControls[] = {
    {0, "[BOS]"},
    {1, "[EOS]"},
    {2, "<|end_of_msg|>"},
    {3, "<|open|>"},
    {4, "<|close|>"},
    {5, "<|sep|>"},
    {18, "<|media_begin|>"},
    {19, "<|media_content|>"},
    {20, "<|media_end|>"},
    {21, "<|media_pad|>"},
    {-2, "[UNK]"},
    {-1, "[PAD]"},
};

std::vector<std::string> control_tokens(std::int64_t first, std::int64_t n) {
  std::vector<std::string> out;
  for (std::int64_t i = 0; i < n; ++i) {
    out.push_back("<|reserved_token_" + std::to_string(first + i) + "|>");
  }
  for (const ControlToken& c : kControls) {
    out.at(static_cast<std::size_t>(c.from_start < 0 ? n + c.from_start : c.from_start)) = c.text;
  }
  return out;
}

}  // namespace

MetadataEntries synth_vocabulary(std::int64_t n_vocab) {
  constexpr std::int64_t kLarge = 4096, kMost = 4'000'000;
  const std::int64_t n_control = n_vocab >= kLarge ? 256 : 32;
  if (n_vocab < 256 + n_control || n_vocab > kMost) {
    throw std::invalid_argument("vocabulary " + std::to_string(n_vocab) + ": expected " +
                                std::to_string(256 + 32) + " to " + std::to_string(kMost));
  }
  const ByteAlphabet alphabet;
  std::vector<std::string> tokens, merges;
  std::unordered_map<std::string, std::int64_t> rank_of;
  for (const int b : alphabet.bytes_in_order) {
    tokens.push_back(alphabet.by_byte[static_cast<std::size_t>(b)]);
    rank_of.emplace(std::string(1, static_cast<char>(b)), rank_of.size());
  }
  const std::int64_t first_control = n_vocab - n_control;
  for (Words words; static_cast<std::int64_t>(tokens.size()) < first_control;) {
    const std::string text = words.next();
    const auto [left, right] = last_pair(text, rank_of);
    merges.push_back(alphabet.spell(left) + " " + alphabet.spell(right));
    rank_of.emplace(text, static_cast<std::int64_t>(tokens.size()));
    tokens.push_back(alphabet.spell(text));
  }
  for (std::string& t : control_tokens(first_control, n_control)) tokens.push_back(std::move(t));
  std::vector<std::int32_t> types(tokens.size(), static_cast<std::int32_t>(TokenType::kNormal));
  std::fill(types.begin() + first_control, types.end(),
            static_cast<std::int32_t>(TokenType::kControl));
  const auto id = [&](std::int64_t offset) {
    return static_cast<std::uint32_t>(first_control + offset);
  };
  return {{"tokenizer.ggml.model", "gpt2"},
          {"tokenizer.ggml.pre", "kimi-k2"},
          {"tokenizer.ggml.tokens", std::move(tokens)},
          {"tokenizer.ggml.token_type", std::move(types)},
          {"tokenizer.ggml.merges", std::move(merges)},
          {"tokenizer.ggml.bos_token_id", id(0)},
          {"tokenizer.ggml.eos_token_id", id(2)},
          {"tokenizer.ggml.unknown_token_id", id(n_control - 2)},
          {"tokenizer.ggml.padding_token_id", id(n_control - 1)},
          {"tokenizer.ggml.add_bos_token", false}};
}

}  // namespace k3
