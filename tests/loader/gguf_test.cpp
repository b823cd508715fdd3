// Each bad file is named by its test case; gguf_damage_test.cpp damages real ones.
#include "loader/gguf.h"

#include <cmath>

#include "tests/loader/gguf_bytes.h"

namespace k3 {

using test::GgufBytes;
using test::has;
using test::refusal;
using test::refusal_of;

namespace {

constexpr std::uint64_t kHuge = std::uint64_t{1} << 60;

GgufHeader read(const GgufBytes& b, GgufReadOptions options = {}) {
  return read_gguf(MemorySource(b.bytes, "good.gguf"), options);
}

GgufBytes one_key(std::string_view key, ValueType type) {
  GgufBytes b;
  return b.header(0, 1).key(key, type);
}

}  // namespace

TEST_CASE("a small valid file is read as written") {
  const GgufHeader h = read(GgufBytes::good());
  CHECK(h.version == 3);
  CHECK(h.alignment == 32);
  REQUIRE(h.tensors.size() == 1);
  const TensorInfo& t = h.tensors[0];
  CHECK(t.name == "t");
  CHECK(t.type == BlockType::kF32);
  CHECK(t.n_dims == 1);
  CHECK(t.dims == std::array<std::int64_t, 4>{8, 1, 1, 1});
  CHECK(t.offset == h.data_begin);
  CHECK(t.offset == 64);
  CHECK(t.bytes == 32);
  CHECK(t.shape() == "[8]");
  GgufBytes v2;
  CHECK(read(v2.header(0, 0, 2)).version == 2);
}

TEST_CASE("every value type keeps its type and value") {
  GgufBytes b;
  b.header(0, 13);
  b.key("u8", ValueType::kU8).number<std::uint8_t>(200);
  b.key("i8", ValueType::kI8).number<std::int8_t>(-5);
  b.key("u16", ValueType::kU16).number<std::uint16_t>(60000);
  b.key("i16", ValueType::kI16).number<std::int16_t>(-300);
  b.key("u32", ValueType::kU32).number<std::uint32_t>(4000000000u);
  b.key("i32", ValueType::kI32).number<std::int32_t>(-70000);
  b.key("f32", ValueType::kF32).number<float>(1.5f);
  b.key("bool", ValueType::kBool).number<std::uint8_t>(1);
  b.key("string", ValueType::kString).text("caf\xc3\xa9");
  b.key("u64", ValueType::kU64).u64(~std::uint64_t{0});
  b.key("i64", ValueType::kI64).number<std::int64_t>(std::numeric_limits<std::int64_t>::min());
  b.key("f64", ValueType::kF64).number<double>(1e300);
  b.key("words", ValueType::kArray).array(ValueType::kString, 2).text("a").text("");
  const GgufHeader h = read(b);
  const Metadata& m = h.metadata;

  CHECK(m.get<int>("u8") == 200);
  CHECK(m.get<std::int8_t>("i8") == -5);
  CHECK(m.get<std::uint64_t>("u16") == 60000);
  CHECK(m.get<std::int64_t>("i16") == -300);
  CHECK(m.get<std::int64_t>("u32") == 4000000000);
  CHECK(m.get<float>("i32") == -70000.0f);
  CHECK(m.get<double>("f32") == 1.5);
  CHECK(m.get<bool>("bool") == true);
  CHECK(m.get<std::string>("string") == "caf\xc3\xa9");
  CHECK(m.get<std::uint64_t>("u64") == ~std::uint64_t{0});
  CHECK(m.get<std::int64_t>("i64") == std::numeric_limits<std::int64_t>::min());
  CHECK(m.get<double>("f64") == 1e300);
  REQUIRE(m.strings("words") != nullptr);
  CHECK(*m.strings("words") == std::vector<std::string>{"a", ""});
  CHECK(m.get_array<std::string>("words")->size() == 2);

  CHECK(m.entries().size() == 13);
  CHECK(m.entries()[3].first == "i16");  // the order of the file
  CHECK(m.find("u8")->type() == ValueType::kU8);
  CHECK(m.find("words")->element_type() == ValueType::kString);
  CHECK(m.find("words")->describe() == "array of 2 string");
  CHECK(m.find("absent") == nullptr);
  CHECK(!m.get<int>("absent"));
  CHECK(!m.get_array<int>("absent"));
  CHECK(m.strings("absent") == nullptr);
}

TEST_CASE("arrays of every element type are read") {
  GgufBytes b;
  b.header(0, 6);
  b.key("u8", ValueType::kArray)
      .array(ValueType::kU8, 2)
      .number<std::uint8_t>(1)
      .number<std::uint8_t>(2);
  b.key("i32", ValueType::kArray).array(ValueType::kI32, 2).u32(5).number<std::int32_t>(-1);
  b.key("f32", ValueType::kArray).array(ValueType::kF32, 1).number<float>(0.25f);
  b.key("bool", ValueType::kArray)
      .array(ValueType::kBool, 2)
      .number<std::uint8_t>(0)
      .number<std::uint8_t>(1);
  b.key("empty", ValueType::kArray).array(ValueType::kU64, 0);
  b.key("nested", ValueType::kArray).array(ValueType::kArray, 2);
  b.array(ValueType::kU16, 1).number<std::uint16_t>(7);
  b.array(ValueType::kArray, 1).array(ValueType::kString, 1).text("deep");
  const Metadata m = read(b).metadata;
  CHECK(m.get_array<std::uint8_t>("u8") == std::vector<std::uint8_t>{1, 2});
  CHECK(m.get_array<std::int64_t>("i32") == std::vector<std::int64_t>{5, -1});
  CHECK(m.get_array<double>("f32") == std::vector<double>{0.25});
  CHECK(m.get_array<bool>("bool") == std::vector<bool>{false, true});
  CHECK(m.get_array<int>("empty")->empty());
  CHECK(has(refusal_of([&] { m.get_array<unsigned>("i32"); }), "array of 2 i32"));
  const auto& outer = std::get<NestedArray>(m.find("nested")->data).items;
  REQUIRE(outer.size() == 2);
  CHECK(outer[0] == Value(std::vector<std::uint16_t>{7}));
  CHECK(std::get<NestedArray>(outer[1].data).items[0] == Value(std::vector<std::string>{"deep"}));
}

TEST_CASE("a value of another kind is refused with file, key, found and expected") {
  GgufBytes b;
  b.header(0, 5);
  b.key("count", ValueType::kU32).u32(300);
  b.key("text", ValueType::kString).text("abc");
  b.key("list", ValueType::kArray).array(ValueType::kU32, 1).u32(1);
  b.key("flag", ValueType::kBool).number<std::uint8_t>(0);
  b.key("big", ValueType::kF64).number<double>(1e300);
  const Metadata m = read(b).metadata;
  CHECK(refusal_of([&] { m.get<std::uint8_t>("count"); }) ==
        "good.gguf: count: is u32 300, expected an integer from 0 to 255");
  CHECK(refusal_of([&] { m.get<std::int8_t>("count"); }) ==
        "good.gguf: count: is u32 300, expected an integer from -128 to 127");
  CHECK(refusal_of([&] { m.get<int>("text"); }) ==
        "good.gguf: text: is string \"abc\", expected an integer");
  CHECK(refusal_of([&] { m.get<std::string>("count"); }) ==
        "good.gguf: count: is u32 300, expected a string");
  CHECK(refusal_of([&] { m.get<int>("list"); }) ==
        "good.gguf: list: is array of 1 u32, expected a single value");
  CHECK(refusal_of([&] { m.get_array<int>("count"); }) ==
        "good.gguf: count: is u32 300, expected an array");
  CHECK(refusal_of([&] { m.strings("list"); }) ==
        "good.gguf: list: is array of 1 u32, expected an array of strings");
  CHECK(has(refusal_of([&] { m.get<int>("flag"); }), "expected an integer"));
  CHECK(has(refusal_of([&] { m.get<float>("flag"); }), "expected a number"));
  CHECK(has(refusal_of([&] { m.get<bool>("count"); }), "expected a bool"));
  CHECK(has(refusal_of([&] { m.get<float>("big"); }), "fits a 32-bit float"));
  CHECK(refusal_of([&] { m.require<int>("absent"); }) == "good.gguf: absent: the key is missing");
}

TEST_CASE("not_gguf, bad_magic and big_endian are told apart") {
  GgufBytes other;
  CHECK(has(refusal(other.raw("PK\x03\x04 something else", 20)),
            "not a GGUF file: begins with \"PK\\x03\\x04\""));
  GgufBytes pointer;
  CHECK(has(refusal(pointer.raw("version https://git-lfs", 23)), "Git LFS pointer"));
  GgufBytes reversed;
  CHECK(has(refusal(reversed.raw("FUGG", 4).u32(3)), "big-endian"));
  GgufBytes swapped;
  CHECK(has(refusal(swapped.header(0, 0, 0x03000000u)), "big-endian"));
  GgufBytes two_bytes;
  CHECK(has(refusal(two_bytes.raw("GG", 2)), "not a GGUF file: 2 bytes"));
  CHECK(has(refusal(GgufBytes()), "not a GGUF file: 0 bytes"));
}

TEST_CASE("versions other than 2 and 3 are refused") {
  for (const std::uint32_t version : {0u, 1u, 4u, 0xffffffffu}) {
    GgufBytes b;
    CHECK(has(refusal(b.header(0, 0, version)), "expected 2 or 3"));
  }
}

TEST_CASE("counts and lengths of 2^60 are refused before anything is allocated") {
  GgufBytes keys;
  CHECK(has(refusal(keys.header(0, kHuge)), "metadata keys cannot fit"));
  GgufBytes tensors;
  CHECK(has(refusal(tensors.header(kHuge, 0)), "tensors cannot fit"));
  GgufBytes key_length;
  CHECK(has(refusal(key_length.header(0, 1).u64(kHuge).data(32)), "name of 1152921504606846976"));
  CHECK(has(refusal(one_key("s", ValueType::kString).u64(kHuge)), "s: 1152921504606846976 bytes"));
  for (const ValueType type :
       {ValueType::kU8, ValueType::kF64, ValueType::kBool, ValueType::kString, ValueType::kArray}) {
    GgufBytes b = one_key("a", ValueType::kArray).array(type, kHuge).data(64);
    CHECK(has(refusal(b), "cannot fit"));
  }
  GgufBytes name_length;
  CHECK(has(refusal(name_length.header(1, 0).u64(kHuge).data(64)), "expected 1 to 64"));
}

TEST_CASE("wild_alignment: only powers of two from 8 to 2^20 pass, however they are stored") {
  const auto aligned = [](ValueType type, auto value) {
    GgufBytes b;
    return b.header(0, 1).key("general.alignment", type).number(value);
  };
  for (const std::uint32_t bad : {0u, 3u, 4u, 48u, 1u << 21, 1u << 30, 0xffffffffu}) {
    CHECK(has(refusal(aligned(ValueType::kU32, bad)),
              "general.alignment: is " + std::to_string(bad)));
  }
  CHECK(has(refusal(aligned(ValueType::kI64, std::int64_t{-32})), "general.alignment: is i64 -32"));
  CHECK(has(refusal(aligned(ValueType::kF32, 32.0f)), "general.alignment: is f32 32"));
  CHECK(has(refusal(aligned(ValueType::kU64, kHuge)), "expected a power of two"));
  GgufBytes text;
  CHECK(has(refusal(text.header(0, 1).key("general.alignment", ValueType::kString).text("32")),
            "expected an integer"));
  CHECK(read(aligned(ValueType::kU8, std::uint8_t{64})).alignment == 64);
  CHECK(read(aligned(ValueType::kI32, std::int32_t{8})).alignment == 8);
  CHECK(read(aligned(ValueType::kU64, std::uint64_t{4096})).alignment == 4096);
}

TEST_CASE("duplicate_key and bad keys") {
  GgufBytes twice;
  twice.header(0, 2).key("k", ValueType::kU8).number<std::uint8_t>(1);
  CHECK(has(refusal(twice.key("k", ValueType::kU8).number<std::uint8_t>(1)),
            "k: the key occurs twice"));
  CHECK(has(refusal(one_key("", ValueType::kU32).u32(0)), "name of 0 bytes"));
  CHECK(has(refusal(one_key("a\nb", ValueType::kU32).u32(0)), "\"a\\x0ab\" holds control"));
  GgufBytes type;
  CHECK(has(refusal(type.header(0, 1).text("k").u32(13).u64(0)), "k: value type 13"));
  GgufBytes element;
  element.header(0, 1).key("k", ValueType::kArray).u32(99).u64(0);
  CHECK(has(refusal(element), "k: array element type 99"));
  CHECK(has(refusal(one_key("k", ValueType::kBool).number<std::uint8_t>(2)), "bool stored as 2"));
}

TEST_CASE("nested_arrays are read to a depth of 4 and refused beyond") {
  const auto nested = [](int depth) {
    GgufBytes b = one_key("n", ValueType::kArray);
    for (int i = 0; i < depth; ++i) b.array(ValueType::kArray, 1);
    return b.array(ValueType::kU8, 1).number<std::uint8_t>(9);
  };
  CHECK(refusal(nested(4)).empty());
  CHECK(has(refusal(nested(5)), "nested more than 4 deep"));
  CHECK(has(refusal(nested(100000)), "nested more than 4 deep"));
  CHECK(refusal(one_key("n", ValueType::kArray).array(ValueType::kArray, 0)).empty());
}

TEST_CASE("unknown_type names the tensor and the type") {
  GgufBytes b;
  b.header(1, 0).tensor("blk.0.ffn_up.weight", {256}, 15, 0).pad().data(512);
  CHECK(refusal(b) ==
        "bad.gguf: blk.0.ffn_up.weight: tensor type Q8_K (id 15) is not one this "
        "program decodes");
  GgufBytes unknown;
  CHECK(has(refusal(unknown.header(1, 0).tensor("t", {256}, 77, 0).pad().data(512)),
            "tensor type type 77 (id 77)"));
}

TEST_CASE("bad_dims: zero, too many, overflowing products, rows that are not whole blocks") {
  const auto shaped = [](std::initializer_list<std::uint64_t> dims, std::uint32_t type = 0) {
    GgufBytes b;
    return b.header(1, 0).tensor("t", dims, type, 0).pad().data(64);
  };
  CHECK(has(refusal(shaped({8, 0})), "t: dimension 1 is 0"));
  CHECK(has(refusal(shaped({})), "t: 0 dimensions"));
  CHECK(has(refusal(shaped({1, 1, 1, 1, 1})), "t: 5 dimensions"));
  const std::uint64_t half = std::uint64_t{1} << 32;
  CHECK(has(refusal(shaped({half, half})), "overflows"));
  CHECK(has(refusal(shaped({half, half, half, half})), "overflows"));
  CHECK(has(refusal(shaped({~std::uint64_t{0}})), "overflows"));
  CHECK(has(refusal(shaped({kHuge * 4})),
            "size in bytes overflows"));  // 2^62 elements fit, bytes not
  CHECK(has(refusal(shaped({kHuge})), "ends at byte"));
  CHECK(has(refusal(shaped({33}, 8)), "rows of 33 elements are not whole blocks of 32 (Q8_0)"));
  CHECK(has(refusal(shaped({16, 2}, 8)), "rows of 16 elements"));
}

TEST_CASE("offset_past_end, cut_inside_block, misaligned and overflowing offsets") {
  const auto placed = [](std::uint64_t offset, std::size_t data) {
    GgufBytes b;
    return b.header(1, 0).tensor("t", {8}, 0, offset).pad().data(data);
  };
  CHECK(refusal(placed(32, 64)).empty());
  CHECK(has(refusal(placed(32, 63)), "t: ends at byte 128, file has 127"));
  CHECK(has(refusal(placed(64, 64)), "t: ends at byte"));
  CHECK(has(refusal(placed(4, 64)), "not a multiple of the alignment 32"));
  CHECK(has(refusal(placed(~std::uint64_t{31}, 64)), "overflows"));
  CHECK(has(refusal(placed(std::uint64_t{1} << 63, 64)), "overflows"));
  // Planning reads headers whose data is elsewhere, but never impossible ones.
  CHECK(refusal(placed(64, 0), {0, true}).empty());
  CHECK(has(refusal(placed(4, 0), {0, true}), "not a multiple"));
  CHECK(has(refusal(placed(std::uint64_t{1} << 63, 0), {0, true}), "overflows"));
}

TEST_CASE("duplicate_tensor and overlapping tensors") {
  GgufBytes twice;
  twice.header(2, 0).tensor("t", {8}, 0, 0).tensor("t", {8}, 0, 32).pad().data(64);
  CHECK(has(refusal(twice), "t: the tensor occurs twice"));
  GgufBytes overlap;
  overlap.header(2, 0).tensor("b", {8}, 0, 32).tensor("a", {16}, 0, 0).pad().data(64);
  CHECK(has(refusal(overlap), "b: begins at byte 128, inside a, which ends at byte 160"));
  GgufBytes apart;
  apart.header(2, 0).tensor("b", {8}, 0, 64).tensor("a", {16}, 0, 0).pad().data(96);
  CHECK(refusal(apart).empty());
}

TEST_CASE("a failing disk is an error of the environment, not of the file") {
  const GgufBytes good = GgufBytes::good();
  const MemorySource memory(good.bytes);
  CHECK_THROWS_AS(read_gguf(FailingSource(memory, 0)), std::system_error);
  CHECK_NOTHROW(read_gguf(FailingSource(memory, 100)));
}

TEST_CASE("a vocabulary of 163840 strings is read") {
  constexpr std::uint64_t kVocab = 163840;
  GgufBytes b = one_key("tokens", ValueType::kArray).array(ValueType::kString, kVocab);
  for (std::uint64_t i = 0; i < kVocab; ++i) b.text("token" + std::to_string(i));
  const Metadata m = read(b).metadata;
  const std::vector<std::string>* tokens = m.strings("tokens");
  REQUIRE(tokens != nullptr);
  REQUIRE(tokens->size() == kVocab);
  CHECK(tokens->front() == "token0");
  CHECK(tokens->back() == "token163839");
}

TEST_CASE("text from a file is made fit for one line") {
  CHECK(printable("plain text") == "plain text");
  CHECK(printable("a\nb\x7f\xc3") == "a\\x0ab\\x7f\\xc3");
  CHECK(printable(std::string(500, 'x')).size() <= 90);
}

}  // namespace k3
