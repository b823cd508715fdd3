#include "kernels/cpu/dequant.h"

#include <doctest/doctest.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/codebooks.h"
#include "kernels/half.h"

namespace k3 {
namespace {

const std::string kDequant = K3_TEST_DATA "/dequant/";

std::vector<std::byte> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), path);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::byte> bytes(chars.size());
  std::memcpy(bytes.data(), chars.data(), chars.size());
  return bytes;
}

std::vector<float> read_floats(const std::string& path) {
  const std::vector<std::byte> bytes = read_bytes(path);
  std::vector<float> floats(bytes.size() / sizeof(float));
  std::memcpy(floats.data(), bytes.data(), floats.size() * sizeof(float));
  return floats;
}

nlohmann::json read_json(const std::string& path) {
  std::ifstream in(path);
  REQUIRE_MESSAGE(in.good(), path);
  return nlohmann::json::parse(in);
}

bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

struct Vectors {
  BlockType type;
  std::vector<std::byte> blocks;
  std::vector<float> values;
};

std::vector<Vectors> all_vectors() {
  std::vector<Vectors> all;
  const nlohmann::json manifest = read_json(kDequant + "manifest.json");
  for (const auto& entry : manifest["types"]) {
    const auto type = block_type_from_id(entry["id"].get<std::uint32_t>());
    REQUIRE_MESSAGE(type.has_value(), entry.dump());
    const BlockTraits& t = traits(*type);
    CHECK(entry["type"].get<std::string>() == t.name);
    CHECK(entry["block_elements"].get<int>() == t.elems);
    CHECK(entry["block_bytes"].get<int>() == t.bytes);
    all.push_back({*type, read_bytes(kDequant + entry["data"].get<std::string>()),
                   read_floats(kDequant + entry["values"].get<std::string>())});
  }
  return all;
}

}  // namespace

TEST_CASE("every block type decodes bit for bit as the reference does") {
  const std::vector<Vectors> all = all_vectors();
  CHECK(all.size() == 24);  // every BlockType but F32
  for (const Vectors& v : all) {
    CAPTURE(traits(v.type).name);
    std::vector<float> out(v.values.size());
    REQUIRE(v.blocks.size() == block_bytes(v.type, out.size()));
    dequantize(v.type, v.blocks.data(), out.data(), static_cast<std::int64_t>(out.size()));
    CHECK(same_bits(out.data(), v.values.data(), out.size()));
  }
}

TEST_CASE("F32 blocks are copied") {
  const float in[3] = {1.5f, -0.0f, 1e-40f};
  float out[3] = {};
  dequantize(BlockType::kF32, reinterpret_cast<const std::byte*>(in), out, 3);
  CHECK(same_bits(in, out, 3));
}

TEST_CASE("any range of a row equals the same elements of the whole row") {
  std::mt19937 random(7);
  for (const Vectors& v : all_vectors()) {
    CAPTURE(traits(v.type).name);
    const std::int64_t n = static_cast<std::int64_t>(v.values.size());
    const std::int64_t elems = traits(v.type).elems;
    for (int round = 0; round < 200; ++round) {
      // Short ranges stay inside a block or cross one border; long ones cover many.
      const std::int64_t longest = round % 2 == 0 ? n : std::min<std::int64_t>(n, elems + 40);
      const std::int64_t count = static_cast<std::int64_t>(random()) % longest + 1;
      const std::int64_t first = static_cast<std::int64_t>(random()) % (n - count + 1);
      CAPTURE(first);
      CAPTURE(count);
      std::vector<float> out(static_cast<std::size_t>(count) + 1, 1234.0f);
      dequantize_range(v.type, v.blocks.data(), first, count, out.data());
      CHECK(same_bits(out.data(), v.values.data() + first, static_cast<std::size_t>(count)));
      CHECK(out.back() == 1234.0f);  // nothing is written past the range
    }
    float untouched = 5.0f;
    dequantize_range(v.type, v.blocks.data(), 3, 0, &untouched);
    CHECK(untouched == 5.0f);
  }
}

TEST_CASE("a range does not read blocks past its end") {
  // The row is cut after the block the range ends in, in memory of exactly that size: a sanitizer sees any excess.
  for (const Vectors& v : all_vectors()) {
    const BlockTraits& t = traits(v.type);
    if (t.elems == 1) continue;
    const std::vector<std::byte> one(v.blocks.begin(), v.blocks.begin() + t.bytes);
    std::vector<float> out(static_cast<std::size_t>(t.elems) - 8);
    dequantize_range(v.type, one.data(), 4, t.elems - 8, out.data());
    CHECK(same_bits(out.data(), v.values.data() + 4, out.size()));
  }
}

TEST_CASE("elements that are not whole blocks are refused") {
  const std::byte block[50] = {};
  float out[256];
  CHECK_THROWS_AS(dequantize(BlockType::kIQ1_S, block, out, 255), std::invalid_argument);
  CHECK_THROWS_AS(dequantize(BlockType::kIQ1_S, block, out, -256), std::invalid_argument);
  CHECK_NOTHROW(dequantize(BlockType::kIQ1_S, block, out, 0));
}

TEST_CASE("the codebooks equal the published tables") {
  const auto check = [](const char* name, const auto& grid) {
    CAPTURE(name);
    const auto rows = read_json(std::string(K3_TEST_DATA "/codebooks/") + name + ".json")["values"];
    REQUIRE(rows.size() == std::size(grid.v));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      REQUIRE(rows[i].size() == sizeof grid.v[i]);
      for (std::size_t j = 0; j < rows[i].size(); ++j) {
        const auto byte = static_cast<std::int8_t>(grid[i] >> (8 * j) & 255);
        REQUIRE(rows[i][j].get<int>() == byte);
      }
    }
  };
  check("iq1s_grid", kIq1sGrid);
  check("iq2xxs_grid", kIq2xxsGrid);
  check("iq2xs_grid", kIq2xsGrid);
  check("iq2s_grid", kIq2sGrid);
  check("iq3xxs_grid", kIq3xxsGrid);
  check("iq3s_grid", kIq3sGrid);

  const auto values = [](const char* name) {
    return read_json(std::string(K3_TEST_DATA "/codebooks/") + name + ".json")["values"]
        .get<std::vector<int>>();
  };
  CHECK(
      std::equal(std::begin(kIq4nlValues), std::end(kIq4nlValues), values("iq4nl_values").begin()));
  const std::vector<int> mxfp4 = values("mxfp4_values");
  CHECK(std::equal(std::begin(kMxfp4Values), std::end(kMxfp4Values), mxfp4.begin()));
  const std::vector<int> masks = values("sign_masks");
  REQUIRE(masks.size() == 128);
  for (std::uint32_t i = 0; i < 128; ++i) {
    CHECK(sign_mask(i) == static_cast<std::uint32_t>(masks[i]));
  }
}

TEST_CASE("names and ids of block types agree both ways") {
  for (std::uint32_t id = 0; id < 64; ++id) {
    const auto type = block_type_from_id(id);
    if (!type) continue;
    CHECK(static_cast<std::uint32_t>(*type) == id);
    CHECK(std::string(block_type_name(id)) == traits(*type).name);
    CHECK(block_type_from_name(traits(*type).name) == *type);
    CHECK(traits(*type).elems % traits(*type).granule == 0);
  }
  CHECK(block_type_from_name("iq1_s") == BlockType::kIQ1_S);
  CHECK(!block_type_from_name("IQ1_SX"));
  CHECK(!block_type_from_name(""));
  CHECK(!block_type_from_id(15));
  CHECK(std::string(block_type_name(15)) == "Q8_K");
  CHECK(std::string(block_type_name(77)) == "type 77");
  CHECK(std::string(block_type_name(4294967295u)) == "type 4294967295");
}

TEST_CASE("binary16 and bfloat16 go to float and back unchanged, and round to nearest even") {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const auto bits = static_cast<std::uint16_t>(h);
    const float f = half_to_float(bits);
    if (std::isnan(f)) {
      CHECK(std::isnan(half_to_float(float_to_half(f))));
    } else {
      REQUIRE(float_to_half(f) == bits);
    }
    const float b = bf16_to_float(bits);
    if (!std::isnan(b)) REQUIRE(float_to_bf16(b) == bits);
  }
  CHECK(half_to_float(0x0001) == 0x1p-24f);
  CHECK(half_to_float(0x7bff) == 65504.0f);
  CHECK(std::isinf(half_to_float(0xfc00)));
  CHECK(float_to_half(1.0f + 0x1p-11f) == 0x3c00);             // a tie: down to even
  CHECK(float_to_half(1.0f + 0x1p-10f + 0x1p-11f) == 0x3c02);  // a tie: up to even
  CHECK(float_to_half(65519.0f) == 0x7bff);
  CHECK(float_to_half(65520.0f) == 0x7c00);
  CHECK(float_to_half(0x1p-25f) == 0x0000);
  CHECK(float_to_half(0x1.8p-25f) == 0x0001);
  CHECK(float_to_half(0x1.ffffp-15f) == 0x0400);  // rounds up into the normal range
  CHECK(float_to_bf16(1.0f + 0x1p-8f) == 0x3f80);
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

}  // namespace k3
