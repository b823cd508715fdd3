#include "rank/tokenizer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "loader/gguf.h"
#include "rank/detokenizer.h"
#include "rank/pretokenizer.h"

using namespace k3;
using Ids = std::vector<std::int32_t>;

namespace {

std::string utf8(unsigned c) {
  if (c < 0x80) return {static_cast<char>(c)};
  return {static_cast<char>(0xc0 | (c >> 6)), static_cast<char>(0x80 | (c & 0x3f))};
}

// Bytes as a GGUF spells them: written out from the rule, apart from the code under test.
std::string spelled(std::string_view bytes) {
  std::string out;
  for (const char b : bytes) {
    const unsigned c = static_cast<unsigned char>(b);
    if (c <= 0x20) {
      out += utf8(0x100 + c);
    } else if (c <= 0x7e) {
      out += utf8(c);
    } else if (c <= 0xa0) {
      out += utf8(0x121 + c - 0x7f);
    } else {
      out += utf8(c == 0xad ? 0x143 : c);
    }
  }
  return out;
}

constexpr std::int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5;

// Ids 0 to 255 are the bytes in order; then the merges; then the control tokens.
Vocab make_vocab(const std::vector<std::string>& merges) {
  Vocab v;
  v.model = "gpt2";
  v.pre = "kimi-k2";
  for (int b = 0; b < 256; ++b) v.tokens.push_back(spelled(std::string(1, static_cast<char>(b))));
  for (const auto& m : merges) v.tokens.push_back(spelled(m));
  v.types.assign(v.tokens.size(), kNormal);
  return v;
}

std::int32_t add(Vocab& v, const std::string& spelling, std::int32_t type) {
  v.tokens.push_back(spelling);
  v.types.push_back(type);
  return static_cast<std::int32_t>(v.tokens.size()) - 1;
}

Ids encode(const Tokenizer& t, std::string_view text) {
  return t.encode(text, ControlText::kAsText);
}
Ids encode_markup(const Tokenizer& t, std::string_view text) {
  return t.encode(text, ControlText::kRecognised);
}

std::string error_of(const Vocab& v) {
  try {
    Tokenizer t(v);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& s, std::string_view part) {
  return s.find(part) != std::string::npos;
}

std::vector<std::string> cut(const Pretokenizer& p, std::string_view text) {
  std::vector<std::string_view> pieces;
  p.cut(text, pieces);
  return {pieces.begin(), pieces.end()};
}

std::string random_bytes(std::mt19937& rng, std::size_t n) {
  // Mostly pieces of characters, blanks and markup, so that broken UTF-8 is common.
  static const std::array<std::string, 16> parts = {
      "a",    "B",        " ",    "\n",          "\xe4\xb8\xad", "\xe4\xb8",
      "\xad", "\xf0\x9f", "\xff", "<|sep|>",     "<|se",         "\xcc\x81",
      "1",    "'s",       "!",    "\xed\xa0\x80"};
  std::string s;
  while (s.size() < n) s += parts[rng() % parts.size()];
  return s;
}

// The definition of joining, with nothing clever.
std::vector<std::string> join_by_definition(const std::vector<std::string>& merges,
                                            const std::string& piece) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  const auto rank = [&](const std::string& s) {
    return static_cast<std::size_t>(std::find(merges.begin(), merges.end(), s) - merges.begin());
  };
  if (rank(piece) < merges.size()) return {piece};
  for (;;) {
    std::size_t best = merges.size(), at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const std::size_t r = rank(parts[i] + parts[i + 1]);
      if (r < best) best = r, at = i;
    }
    if (best == merges.size()) return parts;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

}  // namespace

TEST_CASE("the pair of lowest id is joined first, wherever it stands") {
  const Tokenizer t(make_vocab({"bc", "ab", "abc"}));
  // Longest match or leftmost first would take "ab" (257) and then find no "cd".
  CHECK(encode(t, "abcd") == Ids{258, 'd'});
  CHECK(encode(t, "abd") == Ids{257, 'd'});
  const Tokenizer u(make_vocab({"bc", "ab"}));
  CHECK(encode(u, "abc") == Ids{'a', 256});
}

TEST_CASE("of equal pairs the leftmost is joined first") {
  const Tokenizer t(make_vocab({"aa"}));
  CHECK(encode(t, "aaa") == Ids{256, 'a'});
  CHECK(encode(t, "aaaaa") == Ids{256, 256, 'a'});
}

TEST_CASE("a piece that is a token is that token, even where joining would not reach it") {
  const Tokenizer t(make_vocab({"xyz"}));
  CHECK(encode(t, "xyz") == Ids{256});
  CHECK(encode(t, "xyzx") == Ids{'x', 'y', 'z', 'x'});
}

TEST_CASE("joining with a heap gives what the definition gives") {
  std::mt19937 rng(7);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::string> merges;
    while (merges.size() < 24) {
      std::string m;
      const std::size_t n = 2 + rng() % 4;
      while (m.size() < n) m += static_cast<char>('a' + rng() % 3);
      if (std::find(merges.begin(), merges.end(), m) == merges.end()) merges.push_back(m);
    }
    const Tokenizer t(make_vocab(merges));
    for (int i = 0; i < 20; ++i) {
      std::string piece;
      const std::size_t n = 1 + rng() % 60;
      while (piece.size() < n) piece += static_cast<char>('a' + rng() % 3);
      Ids want;
      for (const auto& part : join_by_definition(merges, piece)) {
        const auto at = std::find(merges.begin(), merges.end(), part) - merges.begin();
        want.push_back(part.size() == 1 ? part[0] : static_cast<std::int32_t>(256 + at));
      }
      CHECK(encode(t, piece) == want);
    }
  }
}

TEST_CASE("no token crosses a cut of the published pattern") {
  const Tokenizer t(make_vocab({"oW", "x\xcc\x81", "x\xcc",
                                "\xe5\x9b\xbd"
                                "a"}));
  // A splitter blind to case keeps HelloWorld whole and would use "oW".
  CHECK(encode(t, "oWo") == Ids{'o', 'W', 'o'});
  // A mark belongs to its letter; a splitter that takes it for punctuation would cut here.
  CHECK(encode(t, "x\xcc\x81") == Ids{257});
  CHECK(encode(t,
               "\xe5\x9b\xbd"
               "a") == Ids{0xe5, 0x9b, 0xbd, 'a'});
}

TEST_CASE("control tokens are text unless recognition is asked for") {
  Vocab v = make_vocab({"<|"});
  const auto sep = add(v, "<|sep|>", kControl);
  const auto sep_more = add(v, "<|sep|>more", kUserDefined);
  add(v, "[PAD7]", kUnused);
  add(v, "[UNK]", kUnknown);
  const Tokenizer t(v);
  CHECK(encode(t, "<|sep|>") == Ids{256, 's', 'e', 'p', '|', '>'});
  CHECK(encode_markup(t, "a<|sep|>b") == Ids{'a', sep, 'b'});
  CHECK(encode_markup(t, "<|sep|<|sep|>") == Ids{256, 's', 'e', 'p', '|', sep});
  CHECK(encode_markup(t, "<|sep|>more") == Ids{sep_more});  // the longest
  CHECK(encode_markup(t, "<|sep|>mor") == Ids{sep, 'm', 'o', 'r'});
  CHECK(encode_markup(t, "[PAD7][UNK]") == encode(t, "[PAD7][UNK]"));
  CHECK(t.find_control("<|sep|>") == sep);
  CHECK_FALSE(t.find_control("[PAD7]").has_value());
  CHECK_FALSE(t.find_control("<|").has_value());
  for (const auto id : {sep, sep_more, sep_more + 1, sep_more + 2}) CHECK(t.is_control(id));
  CHECK_FALSE(t.is_control(256));
}

TEST_CASE("text around a control token is cut as if it stood alone") {
  Vocab v = make_vocab({"  "});
  const auto sep = add(v, "<|sep|>", kControl);
  const Tokenizer t(v);
  // Before a letter the last blank would stay with it; the end of a stretch keeps both.
  CHECK(encode_markup(t, "a  <|sep|>b") == Ids{'a', 256, sep, 'b'});
  CHECK(encode_markup(t, "a  b") == Ids{'a', ' ', ' ', 'b'});
}

TEST_CASE("segments never join, and only markup recognises control tokens") {
  Vocab v = make_vocab({"ab"});
  const auto sep = add(v, "<|sep|>", kControl);
  const Tokenizer t(v);
  CHECK(encode(t, "ab") == Ids{256});
  const std::vector<TextSegment> apart = {{"a", false}, {"b", true}};
  CHECK(t.encode_segments(apart) == Ids{'a', 'b'});
  const std::vector<TextSegment> typed = {{"<|sep|>", true}, {"<|sep|>", false}};
  CHECK(t.encode_segments(typed) == Ids{sep, '<', '|', 's', 'e', 'p', '|', '>'});
}

TEST_CASE("every string of bytes comes back as it was") {
  Vocab v = make_vocab({"aa", "\xe4\xb8", "\xe4\xb8\xad", " a", "\xff\xff", "B\xff"});
  add(v, "<|sep|>", kControl);
  const Tokenizer t(v);
  std::mt19937 rng(3);
  for (int i = 0; i < 300; ++i) {
    const std::string s = random_bytes(rng, rng() % 80);
    CHECK(t.decode(encode(t, s)) == s);
    CHECK(t.decode(encode_markup(t, s)) == s);
  }
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  CHECK(t.decode(encode(t, all)) == all);
  CHECK(encode(t, "").empty());
}

TEST_CASE("a byte that is not UTF-8 is a piece of its own") {
  const Tokenizer t(make_vocab({"\xff\xff", "a\xff"}));
  CHECK(encode(t,
               "a\xff\xff"
               "b") == Ids{'a', 0xff, 0xff, 'b'});
  CHECK(encode(t, "\xed\xa0\x80") == Ids{0xed, 0xa0, 0x80});  // a surrogate
  CHECK(encode(t, "\xc0\x80") == Ids{0xc0, 0x80});            // an overlong NUL
}

TEST_CASE("a run of a million letters is encoded, and not in quadratic time") {
  const Tokenizer t(make_vocab({"aa", "aaaa"}));
  const std::string run(1'000'000, 'a');
  const Ids ids = encode(t, run);
  CHECK(ids == Ids(250'000, 257));
}

TEST_CASE("machine code and interpreter cut alike, and neither fails on a long run") {
  const Pretokenizer fast;
  const Pretokenizer slow(Pretokenizer::Matcher::kInterpreter);
  std::mt19937 rng(11);
  for (int i = 0; i < 200; ++i) {
    const std::string s = random_bytes(rng, rng() % 100);
    CHECK(cut(fast, s) == cut(slow, s));
  }
  for (const char* unit : {"a", "A", "\xd7\x90", "\xe4\xb8\xad", "\xcc\x81", "!", " ", "\n"}) {
    std::string run;
    while (run.size() < 1'000'000) run += unit;
    CHECK(cut(fast, run) == std::vector<std::string>{run});
    CHECK(cut(slow, run) == std::vector<std::string>{run});
  }
}

TEST_CASE("blank and Han are the Unicode properties, not PCRE2's wider ones") {
  const Pretokenizer p;
  using Pieces = std::vector<std::string>;
  // U+30FB is used with Han but is not Han: \p{Han} in PCRE2 10.40 would make this one piece.
  CHECK(cut(p, "中・国") == Pieces{"中", "・", "国"});
  // U+180E is a format character; PCRE2's \s holds it for a blank, and then "!" would stand alone.
  CHECK(cut(p, "\xe1\xa0\x8e!") == Pieces{"\xe1\xa0\x8e!"});
  CHECK(cut(p,
            "a\xc2\x85\xc2\x85"
            "b") == Pieces{"a", "\xc2\x85",
                           "\xc2\x85"
                           "b"});  // U+0085 is a blank
}

TEST_CASE("text is cut after 400,000 characters and runs after 25,000") {
  using Borders = std::vector<std::size_t>;
  CHECK(chunk_borders("").empty());
  CHECK(chunk_borders(std::string(25'000, 'a')).empty());
  CHECK(chunk_borders(std::string(25'001, 'a')) == Borders{25'000});
  CHECK(chunk_borders(std::string(50'001, ' ')) == Borders{25'000, 50'000});
  CHECK(chunk_borders(std::string(20'000, 'a') + " " + std::string(20'000, 'a')).empty());
  std::string chars;  // two bytes each: characters count
  for (int i = 0; i < 25'001; ++i) chars += "\xc3\xa9";
  CHECK(chunk_borders(chars) == Borders{50'000});
  CHECK(chunk_borders(std::string(25'001, '\xff')) == Borders{25'000});
  std::string words;
  while (words.size() < 400'000) words += "word ";
  CHECK(chunk_borders(words).empty());
  CHECK(chunk_borders(words + "w") == Borders{400'000});
  // U+001C is blank to the reference's language though not to Unicode.
  CHECK(chunk_borders(std::string(20'000, ' ') + std::string(5'001, '\x1c')) == Borders{25'000});

  const Tokenizer t(make_vocab({"aa"}));
  const Ids ids = encode(t, "b" + std::string(25'000, 'a'));
  REQUIRE(ids.size() == 12'502);  // b, 12,499 pairs, and an 'a' on either side of the border
  CHECK(Ids(ids.end() - 2, ids.end()) == Ids{'a', 'a'});
}

TEST_CASE("a border does not cut a recognised control token") {
  Vocab v = make_vocab({});
  const auto sep = add(v, "<|sep|>", kControl);
  const Tokenizer t(v);
  std::string text;
  while (text.size() < 399'996) text += "ab ";
  text.resize(399'996);
  text += "<|sep|>c";
  const Ids ids = encode_markup(t, text);
  CHECK(ids.size() == 399'998);
  CHECK(Ids(ids.end() - 2, ids.end()) == Ids{sep, 'c'});
}

TEST_CASE("several threads may encode at once") {
  const Tokenizer t(make_vocab({"aa", " a"}));
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "aaa a \xe4\xb8\xad";
  const Ids want = encode(t, text);
  std::array<Ids, 3> got;
  std::vector<std::thread> threads;
  for (auto& g : got) threads.emplace_back([&] { g = encode(t, text); });
  for (auto& th : threads) th.join();
  for (const auto& g : got) CHECK(g == want);
}

TEST_CASE("an id outside the vocabulary is refused with the vocabulary's size") {
  const Tokenizer t(make_vocab({}));
  CHECK(t.n_vocab() == 256);
  for (const std::int32_t id : {256, -1}) {
    try {
      t.decode(Ids{'a', id});
      FAIL("decoded");
    } catch (const std::invalid_argument& e) {
      CHECK(contains(e.what(), std::to_string(id)));
      CHECK(contains(e.what(), "256 tokens"));
    }
  }
}

TEST_CASE("a vocabulary that cannot be right is refused by name") {
  const Vocab good = make_vocab({"ab"});
  CHECK(error_of(good).empty());
  Vocab v = good;
  v.model = "llama";
  CHECK(contains(error_of(v), "tokenizer.ggml.model: 'llama' is not implemented; 'gpt2' is"));
  v = good;
  v.pre = "qwen2";
  CHECK(contains(error_of(v), "tokenizer.ggml.pre: 'qwen2' is not implemented; 'kimi-k2' is"));
  v = good;
  v.types.pop_back();
  CHECK(contains(error_of(v), "256 types for 257 tokens"));
  v = good;
  v.types[3] = 6;
  CHECK(contains(error_of(v), "token 3 has type 6"));
  v = good;
  v.tokens[256] = "\xe2\x96\x81x";
  CHECK(contains(error_of(v), "token 256 holds U+2581"));
  v = good;
  v.tokens[256] = "\xff";
  CHECK(contains(error_of(v), "token 256 is not valid UTF-8"));
  v = good;
  v.types[0x41] = kUnused;
  CHECK(contains(error_of(v), "no token for the byte 0x41"));
  v = good;
  v.eos = 257;
  CHECK(contains(error_of(v), "tokenizer.ggml.eos_token_id: 257: the vocabulary has 257 tokens"));
  v = good;
  v.bos = -1;
  CHECK(contains(error_of(v), "tokenizer.ggml.bos_token_id: -1"));
  CHECK(contains(error_of(Vocab{{}, {}, {}, {}, {}, "gpt2", "kimi-k2"}),
                 "no token for the byte 0x00"));
}

TEST_CASE("the vocabulary is read from the file's metadata, and a missing key is named") {
  const Vocab v = make_vocab({"ab"});
  const auto metadata = [&](std::string_view without) {
    Metadata m("x.gguf");
    const auto put = [&](const char* key, Value value) {
      if (key != without) m.add(key, std::move(value));
    };
    put("tokenizer.ggml.model", std::string("gpt2"));
    put("tokenizer.ggml.pre", std::string("kimi-k2"));
    put("tokenizer.ggml.tokens", v.tokens);
    put("tokenizer.ggml.token_type", v.types);
    put("tokenizer.ggml.eos_token_id", std::uint32_t{256});
    return m;
  };
  const Vocab read = read_vocab(metadata(""), "x.gguf");
  CHECK(read.tokens == v.tokens);
  CHECK(read.types == v.types);
  CHECK(read.eos == 256);
  CHECK_FALSE(read.bos.has_value());
  CHECK_FALSE(read_vocab(metadata("tokenizer.ggml.eos_token_id"), "x.gguf").eos.has_value());
  for (const char* key : {"tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
                          "tokenizer.ggml.token_type"}) {
    std::string what;
    try {
      read_vocab(metadata(key), "x.gguf");
    } catch (const std::invalid_argument& e) {
      what = e.what();
    }
    CHECK(contains(what, "x.gguf"));
    CHECK(contains(what, key));
  }
}

TEST_CASE("generation stops at the file's eos, at [EOS] and at <|end_of_msg|>") {
  Vocab v = make_vocab({});
  const auto eos = add(v, "[EOS]", kControl);
  const auto msg = add(v, "<|end_of_msg|>", kControl);
  v.eos = msg;
  {
    const Tokenizer t(v);
    CHECK(t.stop_ids() == Ids{eos, msg});
    CHECK(t.is_stop(eos));
    CHECK_FALSE(t.is_stop('a'));
    CHECK(t.warnings().empty());
  }
  v.eos = eos;
  {
    const Tokenizer t(v);
    CHECK(t.stop_ids() == Ids{eos, msg});
    REQUIRE(t.warnings().size() == 1);
    CHECK(contains(t.warnings()[0], "256 is [EOS]"));
    CHECK(contains(t.warnings()[0], "<|end_of_msg|> (257)"));
  }
  v.eos = 'a';
  CHECK(Tokenizer(v).stop_ids() == Ids{'a', eos, msg});
  const Tokenizer none(make_vocab({}));
  CHECK(none.stop_ids().empty());
  CHECK(none.warnings().size() == 1);
}

TEST_CASE("a character comes out when its last byte has come") {
  const Tokenizer t(make_vocab({}));
  Detokenizer d(t);
  CHECK(d.push(0xe4) == "");
  CHECK(d.push(0xb8) == "");
  CHECK(d.push(0xad) == "中");
  CHECK(d.push('a') == "a");
  CHECK(d.flush() == "");
}

TEST_CASE("what never becomes a character is one U+FFFD, or its bytes when raw") {
  const Tokenizer t(make_vocab({"\xf0\x9f"}));
  const auto text = [&](const Ids& ids, bool raw) {
    Detokenizer d(t, {true, raw});
    std::string s;
    for (const auto id : ids) s += d.push(id);
    return s + d.flush();
  };
  const Ids cut_off = {256, 'a', 0xff, 0xe4, 0xb8};
  CHECK(text(cut_off, false) ==
        "\xef\xbf\xbd"
        "a"
        "\xef\xbf\xbd\xef\xbf\xbd");
  CHECK(text(cut_off, true) ==
        "\xf0\x9f"
        "a\xff\xe4\xb8");
  CHECK(text({0xed, 0xa0, 0x80}, false) == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
}

TEST_CASE("a control token is left out or spelled, and ends an open character") {
  Vocab v = make_vocab({});
  const auto sep = add(v, "<|sep|>", kControl);
  const auto unused = add(v, "[PAD1]", kUnused);
  const Tokenizer t(v);
  Detokenizer hide(t);
  CHECK(hide.push(0xe4) == "");
  CHECK(hide.push(sep) == "\xef\xbf\xbd");
  CHECK(hide.push(unused) == "");
  Detokenizer show(t, {false, false});
  CHECK(show.push(0xe4) == "");
  CHECK(show.push(sep) == "\xef\xbf\xbd<|sep|>");
  CHECK_THROWS_AS(show.push(100'000), std::invalid_argument);
}

TEST_CASE("raw output is the bytes, and plain output never holds half a character") {
  const Tokenizer t(make_vocab({"\xe4\xb8", "\xad!", "aa", "\xf0\x9f\x98"}));
  const Pretokenizer pretokenizer;
  std::mt19937 rng(5);
  for (int i = 0; i < 200; ++i) {
    const Ids ids = encode(t, random_bytes(rng, 40));
    Detokenizer raw(t, {true, true});
    Detokenizer plain(t);
    std::string bytes;
    for (const auto id : ids) {
      bytes += raw.push(id);
      const std::string part = plain.push(id);
      for (const auto& piece : cut(pretokenizer, part))
        CHECK(!(piece.size() == 1 && (piece[0] & 0x80)));
    }
    CHECK(bytes + raw.flush() == t.decode(ids));
  }
}
