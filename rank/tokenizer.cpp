#include "rank/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "loader/gguf.h"
#include "rank/pretokenizer.h"
#include "rank/utf8.h"

namespace k3 {
namespace {

constexpr std::string_view kModelName = "gpt2";
constexpr std::string_view kPreName = "kimi-k2";

// GPT-2's byte alphabet: printable bytes stand for themselves, the other 68, in ascending order,
// are U+0100 and on.
std::array<std::int16_t, 0x144> byte_alphabet() {
  std::array<std::int16_t, 0x144> byte_of;
  byte_of.fill(-1);
  std::size_t next = 0x100;
  for (std::int16_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    byte_of[printable ? static_cast<std::size_t>(b) : next++] = b;
  }
  return byte_of;
}

std::string from_byte_alphabet(std::string_view spelled, std::size_t id) {
  static const auto byte_of = byte_alphabet();
  std::string bytes;
  while (!spelled.empty()) {
    const Utf8Scan scan = utf8_scan(spelled);
    const bool whole = scan.kind == Utf8Scan::Kind::kWhole;
    if (!whole || scan.code_point >= byte_of.size() || byte_of[scan.code_point] < 0) {
      throw std::invalid_argument(
          whole ? fmt::format("tokenizer.ggml.tokens: token {} holds U+{:04X}, which is not in "
                              "GPT-2's byte alphabet",
                              id, static_cast<std::uint32_t>(scan.code_point))
                : fmt::format("tokenizer.ggml.tokens: token {} is not valid UTF-8", id));
    }
    bytes += static_cast<char>(byte_of[scan.code_point]);
    spelled.remove_prefix(scan.n);
  }
  return bytes;
}

bool is_normal(std::int32_t type) { return type == static_cast<std::int32_t>(TokenType::kNormal); }

bool is_markup(std::int32_t type) {
  return type == static_cast<std::int32_t>(TokenType::kControl) ||
         type == static_cast<std::int32_t>(TokenType::kUserDefined);
}

void check_names(const Vocab& v) {
  if (v.model != kModelName) {
    throw std::invalid_argument(fmt::format(
        "tokenizer.ggml.model: '{}' is not implemented; '{}' is", printable(v.model), kModelName));
  }
  if (v.pre != kPreName) {
    throw std::invalid_argument(fmt::format("tokenizer.ggml.pre: '{}' is not implemented; '{}' is",
                                            printable(v.pre), kPreName));
  }
}

void check_id(const std::optional<std::int32_t>& id, const char* key, std::size_t n_vocab) {
  if (id && (*id < 0 || static_cast<std::size_t>(*id) >= n_vocab)) {
    throw std::invalid_argument(
        fmt::format("{}: {}: the vocabulary has {} tokens", key, *id, n_vocab));
  }
}

}  // namespace

struct Tokenizer::Impl {
  Vocab vocab;
  std::vector<std::string> bytes;  // of each token; views below point into it
  std::unordered_map<std::string_view, std::int32_t> rank_of;  // normal tokens
  std::size_t longest = 0;                                     // of them, bytes
  std::unordered_map<std::string_view, std::int32_t> control_of;
  std::vector<std::size_t> control_lengths;  // distinct, longest first
  std::array<bool, 256> begins_control{};    // by first byte
  std::vector<std::int32_t> stop_ids;
  std::vector<std::string> warnings;
  Pretokenizer pretokenizer;

  explicit Impl(Vocab v);
  void index_tokens();
  void find_stops();
  std::int32_t rank(std::string_view bytes) const;
  std::string_view control_at(std::string_view text) const;
  void encode_piece(std::string_view piece, std::vector<std::int32_t>& ids) const;
  void join(std::string_view piece, std::vector<std::int32_t>& ids) const;
  void encode_text(std::string_view text, std::vector<std::int32_t>& ids) const;
  void encode(std::string_view text, bool recognise, std::vector<std::int32_t>& ids) const;
  std::size_t checked(std::int32_t id) const;
};

Tokenizer::Impl::Impl(Vocab v) : vocab(std::move(v)) {
  check_names(vocab);
  const std::size_t n = vocab.tokens.size();
  if (n > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument(
        fmt::format("tokenizer.ggml.tokens: {} tokens are more than ids can name", n));
  }
  if (vocab.types.size() != n) {
    throw std::invalid_argument(
        fmt::format("tokenizer.ggml.token_type: {} types for {} tokens", vocab.types.size(), n));
  }
  check_id(vocab.bos, "tokenizer.ggml.bos_token_id", n);
  check_id(vocab.eos, "tokenizer.ggml.eos_token_id", n);
  check_id(vocab.pad, "tokenizer.ggml.padding_token_id", n);
  index_tokens();
  find_stops();
}

void Tokenizer::Impl::index_tokens() {
  bytes.reserve(vocab.tokens.size());
  for (std::size_t i = 0; i < vocab.tokens.size(); ++i) {
    const std::int32_t type = vocab.types[i];
    if (type < 1 || type > 5) {
      throw std::invalid_argument(fmt::format(
          "tokenizer.ggml.token_type: token {} has type {}; 1 to 5 are implemented", i, type));
    }
    bytes.push_back(is_normal(type) ? from_byte_alphabet(vocab.tokens[i], i) : vocab.tokens[i]);
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::string& b = bytes[i];
    if (b.empty()) continue;  // a gap in the vocabulary: it has an id and no text
    const auto id = static_cast<std::int32_t>(i);
    if (is_normal(vocab.types[i])) {
      rank_of.emplace(b, id);  // of two with the same bytes the lower id stays
      longest = std::max(longest, b.size());
    } else if (is_markup(vocab.types[i]) && control_of.emplace(b, id).second) {
      control_lengths.push_back(b.size());
      begins_control[static_cast<std::uint8_t>(b[0])] = true;
    }
  }
  std::sort(control_lengths.begin(), control_lengths.end(), std::greater<>());
  control_lengths.erase(std::unique(control_lengths.begin(), control_lengths.end()),
                        control_lengths.end());
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    if (rank({&byte, 1}) < 0) {
      throw std::invalid_argument(
          fmt::format("tokenizer.ggml.tokens: no token for the byte 0x{:02x}", b));
    }
  }
}

void Tokenizer::Impl::find_stops() {
  const auto spelled = [&](std::string_view s) -> std::optional<std::int32_t> {
    const auto it = control_of.find(s);
    if (it == control_of.end()) return std::nullopt;
    return it->second;
  };
  const auto end_of_text = spelled("[EOS]");
  const auto end_of_msg = spelled("<|end_of_msg|>");
  for (const auto& id : {vocab.eos, end_of_text, end_of_msg}) {
    if (id) stop_ids.push_back(*id);
  }
  std::sort(stop_ids.begin(), stop_ids.end());
  stop_ids.erase(std::unique(stop_ids.begin(), stop_ids.end()), stop_ids.end());
  if (stop_ids.empty()) {
    warnings.push_back(
        "no tokenizer.ggml.eos_token_id and no token [EOS] or <|end_of_msg|>: only the token limit "
        "ends a generation");
  } else if (vocab.eos && vocab.eos == end_of_text && end_of_msg) {
    warnings.push_back(
        fmt::format("tokenizer.ggml.eos_token_id {} is [EOS], the end of a document: generation "
                    "stops at <|end_of_msg|> ({}) as well",
                    *vocab.eos, *end_of_msg));
  }
}

std::int32_t Tokenizer::Impl::rank(std::string_view b) const {
  if (b.size() > longest) return -1;
  const auto it = rank_of.find(b);
  return it == rank_of.end() ? -1 : it->second;
}

// The longest control token that `text` begins with, or nothing.
std::string_view Tokenizer::Impl::control_at(std::string_view text) const {
  if (!begins_control[static_cast<std::uint8_t>(text[0])]) return {};
  for (const std::size_t n : control_lengths) {
    if (n <= text.size() && control_of.count(text.substr(0, n)) != 0) return text.substr(0, n);
  }
  return {};
}

void Tokenizer::Impl::encode_piece(std::string_view piece, std::vector<std::int32_t>& ids) const {
  const std::int32_t whole = rank(piece);
  if (whole >= 0) {
    ids.push_back(whole);
  } else {
    join(piece, ids);
  }
}

// A doubly linked list of parts over the piece and a heap of the pairs that are tokens: n log n in
// the piece's length, where looking for the lowest pair anew each time would be n^2. A pair that a
// join has undone is left in the heap and known by its length, which no longer fits.
void Tokenizer::Impl::join(std::string_view piece, std::vector<std::int32_t>& ids) const {
  struct Part {
    std::size_t begin, end;  // begin == end: joined into the part before
    std::size_t prev, next;  // indices; prev of the first and next of the last: n
  };
  struct Pair {
    std::int32_t rank;
    std::size_t left, length;
    bool operator>(const Pair& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  const std::size_t n = piece.size();
  std::vector<Part> parts(n);
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
  const auto offer = [&](std::size_t left) {
    if (left == n || parts[left].next == n) return;
    const std::size_t length = parts[parts[left].next].end - parts[left].begin;
    const std::int32_t r = rank(piece.substr(parts[left].begin, length));
    if (r >= 0) pairs.push({r, left, length});
  };
  for (std::size_t i = 0; i < n; ++i) parts[i] = {i, i + 1, i == 0 ? n : i - 1, i + 1};
  for (std::size_t i = 0; i < n; ++i) offer(i);
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    Part& left = parts[pair.left];
    if (left.begin == left.end || left.next == n) continue;
    Part& right = parts[left.next];
    if (right.end - left.begin != pair.length) continue;
    left.end = right.end;
    left.next = right.next;
    right.end = right.begin;
    if (left.next != n) parts[left.next].prev = pair.left;
    offer(left.prev);
    offer(pair.left);
  }
  for (std::size_t i = 0; i != n; i = parts[i].next) {
    ids.push_back(rank(piece.substr(parts[i].begin, parts[i].end - parts[i].begin)));
  }
}

void Tokenizer::Impl::encode_text(std::string_view text, std::vector<std::int32_t>& ids) const {
  std::vector<std::string_view> pieces;
  pretokenizer.cut(text, pieces);
  for (const auto piece : pieces) encode_piece(piece, ids);
}

void Tokenizer::Impl::encode(std::string_view text, bool recognise,
                             std::vector<std::int32_t>& ids) const {
  // Borders are counted over the whole text, control tokens included, as the reference counts them;
  // only a border that would cut a recognised token in two is passed over.
  std::size_t begin = 0;
  const auto encode_until = [&](std::size_t end) {
    encode_text(text.substr(begin, end - begin), ids);
    begin = end;
  };
  const std::vector<std::size_t> borders = chunk_borders(text);
  auto border = borders.begin();
  for (std::size_t at = 0; at < text.size();) {
    if (border != borders.end() && at >= *border) {
      if (at == *border) encode_until(at);
      ++border;
      continue;
    }
    const std::string_view control = recognise ? control_at(text.substr(at)) : std::string_view{};
    if (control.empty()) {
      ++at;
      continue;
    }
    encode_until(at);
    ids.push_back(control_of.at(control));
    begin = at += control.size();
  }
  encode_until(text.size());
}

std::size_t Tokenizer::Impl::checked(std::int32_t id) const {
  if (id < 0 || static_cast<std::size_t>(id) >= bytes.size()) {
    throw std::invalid_argument(
        fmt::format("token id {}: the vocabulary has {} tokens", id, bytes.size()));
  }
  return static_cast<std::size_t>(id);
}

Tokenizer::Tokenizer(Vocab vocab) : impl_(std::make_unique<Impl>(std::move(vocab))) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, ControlText control) const {
  std::vector<std::int32_t> ids;
  impl_->encode(text, control == ControlText::kRecognised, ids);
  return ids;
}

std::vector<std::int32_t> Tokenizer::encode_segments(std::span<const TextSegment> segments) const {
  std::vector<std::int32_t> ids;
  for (const auto& s : segments) impl_->encode(s.text, s.is_markup, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string out;
  for (const std::int32_t id : ids) out += bytes(id);
  return out;
}

const std::string& Tokenizer::bytes(std::int32_t id) const {
  return impl_->bytes[impl_->checked(id)];
}

bool Tokenizer::is_control(std::int32_t id) const {
  return !is_normal(impl_->vocab.types[impl_->checked(id)]);
}

std::optional<std::int32_t> Tokenizer::find_control(std::string_view spelling) const {
  const auto it = impl_->control_of.find(spelling);
  if (it == impl_->control_of.end()) return std::nullopt;
  return it->second;
}

std::int32_t Tokenizer::n_vocab() const { return static_cast<std::int32_t>(impl_->bytes.size()); }
const Vocab& Tokenizer::vocab() const { return impl_->vocab; }
const std::vector<std::int32_t>& Tokenizer::stop_ids() const { return impl_->stop_ids; }
const std::vector<std::string>& Tokenizer::warnings() const { return impl_->warnings; }

bool Tokenizer::is_stop(std::int32_t id) const {
  return std::binary_search(impl_->stop_ids.begin(), impl_->stop_ids.end(), id);
}

Vocab read_vocab(const Metadata& meta, const std::string& file) {
  Vocab v;
  v.model = meta.require<std::string>("tokenizer.ggml.model");
  v.pre = meta.require<std::string>("tokenizer.ggml.pre");
  try {
    check_names(v);
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(fmt::format("{}: {}", file, e.what()));
  }
  const auto* tokens = meta.strings("tokenizer.ggml.tokens");
  auto types = meta.get_array<std::int32_t>("tokenizer.ggml.token_type");
  for (const char* missing : {tokens ? nullptr : "tokens", types ? nullptr : "token_type"}) {
    if (missing)
      throw std::invalid_argument(
          fmt::format("{}: tokenizer.ggml.{}: the key is missing", file, missing));
  }
  v.tokens = *tokens;
  v.types = std::move(*types);
  v.bos = meta.get<std::int32_t>("tokenizer.ggml.bos_token_id");
  v.eos = meta.get<std::int32_t>("tokenizer.ggml.eos_token_id");
  v.pad = meta.get<std::int32_t>("tokenizer.ggml.padding_token_id");
  return v;
}

}  // namespace k3
