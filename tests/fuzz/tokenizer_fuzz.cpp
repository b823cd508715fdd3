// Any bytes encode to ids that decode to the same bytes, with control tokens recognised and not,
// and come out of the streaming detokenizer whole; a vocabulary made of the input is refused with
// an error or does the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "loader/parts.h"
#include "rank/detokenizer.h"
#include "rank/tokenizer.h"
#include "rank/utf8.h"

using namespace k3;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "tokenizer_fuzz: " << what << "\n";
  std::abort();
}

void check_round_trip(const Tokenizer& tokenizer, std::string_view text, ControlText control) {
  const auto ids = tokenizer.encode(text, control);
  require(tokenizer.decode(ids) == text, "decode(encode(text)) is another text");
  require(ids.size() <= text.size(), "more tokens than bytes");
  Detokenizer raw(tokenizer, {false, true});
  Detokenizer plain(tokenizer);
  std::string bytes;
  for (const auto id : ids) {
    bytes += raw.push(id);
    for (std::string rest = plain.push(id); !rest.empty();) {
      const Utf8Scan scan = utf8_scan(rest);
      require(scan.kind == Utf8Scan::Kind::kWhole, "half a character came out");
      rest.erase(0, scan.n);
    }
  }
  require(bytes + raw.flush() == text, "the raw stream is another text");
}

// The good vocabulary with some of its tokens, types and special ids replaced from the input.
void check_hostile_vocabulary(const Vocab& good, std::string_view input) {
  Vocab v = good;
  while (input.size() >= 4) {
    const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(input[i]); };
    const std::size_t id = (byte(0) | byte(1) << 8) % v.tokens.size();
    const std::size_t n = std::min<std::size_t>(byte(2) % 16, input.size() - 4);
    switch (byte(3) % 4) {
      case 0:
        v.types[id] = byte(3) / 4 % 8;
        break;
      case 1:
        v.tokens[id] = input.substr(4, n);
        break;
      case 2:
        v.eos = static_cast<std::int32_t>(byte(0) | byte(1) << 8) - 16;
        break;
      default:
        std::swap(v.tokens[id], v.tokens[byte(3)]);
    }
    input.remove_prefix(4 + n);
  }
  try {
    const Tokenizer tokenizer(std::move(v));
    check_round_trip(tokenizer, "The house, <|open|>\xe4\xb8\xad\xff 12", ControlText::kRecognised);
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string path = std::string(K3_TEST_DATA) + "/models/k3-tiny-f32.gguf";
  static const Vocab vocab = read_vocab(ModelFile::open(path).metadata(), path);
  static const Tokenizer tokenizer(vocab);
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  check_round_trip(tokenizer, input, ControlText::kAsText);
  check_round_trip(tokenizer, input, ControlText::kRecognised);
  check_hostile_vocabulary(vocab, input);
  return 0;
}
