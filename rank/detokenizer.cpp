#include "rank/detokenizer.h"

#include <utility>

#include "rank/utf8.h"

namespace k3 {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

Detokenizer::Detokenizer(const Tokenizer& tokenizer, DetokenizerOptions options)
    : tokenizer_(&tokenizer), options_(options) {}

std::string Detokenizer::push(std::int32_t id) {
  const std::string& bytes = tokenizer_->bytes(id);
  std::string out;
  // A control token ends a character that is still open, shown or not: its bytes are no
  // continuation.
  if (tokenizer_->is_control(id)) {
    out = flush();
    if (options_.skip_control) return out;
  }
  append(bytes, out);
  return out;
}

std::string Detokenizer::flush() {
  std::string rest = std::exchange(pending_, {});
  if (rest.empty() || options_.raw) return rest;
  return std::string(kReplacement);  // what waits is always the beginning of one character
}

void Detokenizer::append(std::string_view bytes, std::string& out) {
  pending_ += bytes;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Scan scan = utf8_scan(rest);
    if (scan.kind == Utf8Scan::Kind::kCut) break;
    if (scan.kind == Utf8Scan::Kind::kWhole || options_.raw) {
      out += rest.substr(0, scan.n);
    } else {
      out += kReplacement;
    }
    rest.remove_prefix(scan.n);
  }
  pending_ = std::string(rest);
}

}  // namespace k3
