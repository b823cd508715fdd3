#define PCRE2_CODE_UNIT_WIDTH 8
#include "rank/pretokenizer.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "rank/utf8.h"

// Before 10.40 there is no \p{sc:...}, and from 10.40 on plain \p{Han} also matches characters that
// are merely used with Han (U+3001, U+30FB), which the published pattern does not.
#if PCRE2_MAJOR < 10 || (PCRE2_MAJOR == 10 && PCRE2_MINOR < 40)
#error "PCRE2 10.40 or later is needed"
#endif

namespace k3 {
namespace {

// The published pattern says with set operations, which PCRE2 10.42 lacks:
//   [\p{Han}]+
//   |[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|...)?
//   |[^\r\n\p{L}\p{N}]?[...upper]+[...lower]*(?i:'s|...)?
//   |\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// A union less Han is the complement of the other general categories and Han: one class, so that a
// long run needs no group, and no memory, per character.
#define K3_UPPER R"([^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{sc:Han}])"
#define K3_LOWER R"([^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{sc:Han}])"
// Unicode's White_Space. PCRE2's own \s has U+180E as well.
#define K3_SPACE R"(\x09-\x0d\x{85}\p{Z})"
#define K3_LEAD R"([^\r\n\p{L}\p{N}]?)"
#define K3_CONTRACTION R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
constexpr char kPattern[] = R"([\p{sc:Han}]+)"
                            "|" K3_LEAD K3_UPPER "*" K3_LOWER "+" K3_CONTRACTION
                            "|" K3_LEAD K3_UPPER "+" K3_LOWER "*" K3_CONTRACTION R"(|\p{N}{1,3})"
                            "| ?[^" K3_SPACE R"(\p{L}\p{N}]+[\r\n]*)"
                            "|[" K3_SPACE R"(]*[\r\n]+)"
                            "|[" K3_SPACE "]+(?![^" K3_SPACE
                            "])"
                            "|[" K3_SPACE "]+";

constexpr std::size_t kChunkChars = 400'000;
constexpr std::size_t kRunChars = 25'000;

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

template <auto Free>
struct Freer {
  template <class T>
  void operator()(T* p) const {
    Free(p);
  }
};

// What the reference's language calls blank: White_Space and the four information separators.
bool is_blank(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
         c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

}  // namespace

struct Pretokenizer::Impl {
  std::unique_ptr<pcre2_code, Freer<pcre2_code_free>> code;
  std::unique_ptr<pcre2_match_context, Freer<pcre2_match_context_free>> context;

  // `text` is valid UTF-8.
  void cut(std::string_view text, pcre2_match_data* match,
           std::vector<std::string_view>& pieces) const;
};

Pretokenizer::Pretokenizer(Matcher matcher) : impl_(std::make_unique<Impl>()) {
  int error = 0;
  PCRE2_SIZE at = 0;
  impl_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), PCRE2_ZERO_TERMINATED,
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &at, nullptr));
  if (!impl_->code) {
    throw std::runtime_error(
        fmt::format("pre-tokenizer: PCRE2: {} at offset {}", pcre2_message(error), at));
  }
  // Where machine code cannot be made (not built in, or forbidden to the process) the interpreter
  // does the same.
  if (matcher == Matcher::kFastest) pcre2_jit_compile(impl_->code.get(), PCRE2_JIT_COMPLETE);
  impl_->context.reset(pcre2_match_context_create(nullptr));
  if (!impl_->context) throw std::bad_alloc();
  // The default limits are there for patterns that explode. This one takes time linear in a run, so
  // a long run is no error.
  pcre2_set_match_limit(impl_->context.get(), std::numeric_limits<std::uint32_t>::max());
  pcre2_set_depth_limit(impl_->context.get(), std::numeric_limits<std::uint32_t>::max());
}

Pretokenizer::~Pretokenizer() = default;

void Pretokenizer::Impl::cut(std::string_view text, pcre2_match_data* match,
                             std::vector<std::string_view>& pieces) const {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (std::size_t at = 0; at < text.size();) {
    int rc =
        pcre2_match(code.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK, match, context.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = pcre2_match(code.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                       match, context.get());
    }
    // Every character begins some alternative, so "no match" is as much a failure as any other
    // code.
    if (rc < 0)
      throw std::runtime_error(
          fmt::format("pre-tokenizer: PCRE2: {} at byte {}", pcre2_message(rc), at));
    const std::size_t end = pcre2_get_ovector_pointer(match)[1];
    if (end <= at)
      throw std::runtime_error(fmt::format("pre-tokenizer: an empty piece at byte {}", at));
    pieces.push_back(text.substr(at, end - at));
    at = end;
  }
}

void Pretokenizer::cut(std::string_view text, std::vector<std::string_view>& pieces) const {
  if (text.empty()) return;
  const std::unique_ptr<pcre2_match_data, Freer<pcre2_match_data_free>> match(
      pcre2_match_data_create(1, nullptr));
  if (!match) throw std::bad_alloc();
  std::size_t begin = 0;  // of the valid stretch
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Scan scan = utf8_scan(text.substr(at));
    if (scan.kind == Utf8Scan::Kind::kWhole) {
      at += scan.n;
      continue;
    }
    impl_->cut(text.substr(begin, at - begin), match.get(), pieces);
    for (std::size_t i = 0; i < scan.n; ++i) pieces.push_back(text.substr(at + i, 1));
    at += scan.n;
    begin = at;
  }
  impl_->cut(text.substr(begin), match.get(), pieces);
}

std::vector<std::size_t> chunk_borders(std::string_view text) {
  std::vector<std::size_t> borders;
  std::size_t in_chunk = 0;
  std::size_t run = 0;
  bool run_is_blank = false;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Scan scan = utf8_scan(text.substr(at));
    const bool whole = scan.kind == Utf8Scan::Kind::kWhole;
    const bool blank = whole && is_blank(scan.code_point);
    if (in_chunk == kChunkChars) {
      borders.push_back(at);
      in_chunk = run = 0;
    }
    if (run == 0 || blank != run_is_blank) {
      run = 1;
      run_is_blank = blank;
    } else if (++run > kRunChars) {
      borders.push_back(at);
      run = 1;
    }
    ++in_chunk;
    at += whole ? scan.n : 1;  // the bytes of a broken character count singly: each is a piece
  }
  return borders;
}

}  // namespace k3
