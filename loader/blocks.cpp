#include "loader/blocks.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace k3 {
namespace {

constexpr BlockTraits kTraits[] = {
    {BlockType::kF32, "F32", 1, 4, 1},
    {BlockType::kF16, "F16", 1, 2, 1},
    {BlockType::kQ4_0, "Q4_0", 32, sizeof(BlockQ4_0), 32},
    {BlockType::kQ4_1, "Q4_1", 32, sizeof(BlockQ4_1), 32},
    {BlockType::kQ5_0, "Q5_0", 32, sizeof(BlockQ5_0), 32},
    {BlockType::kQ5_1, "Q5_1", 32, sizeof(BlockQ5_1), 32},
    {BlockType::kQ8_0, "Q8_0", 32, sizeof(BlockQ8_0), 32},
    {BlockType::kQ2_K, "Q2_K", 256, sizeof(BlockQ2_K), 16},
    {BlockType::kQ3_K, "Q3_K", 256, sizeof(BlockQ3_K), 16},
    {BlockType::kQ4_K, "Q4_K", 256, sizeof(BlockQ4_K), 32},
    {BlockType::kQ5_K, "Q5_K", 256, sizeof(BlockQ5_K), 32},
    {BlockType::kQ6_K, "Q6_K", 256, sizeof(BlockQ6_K), 16},
    {BlockType::kIQ2_XXS, "IQ2_XXS", 256, sizeof(BlockIQ2_XXS), 32},
    {BlockType::kIQ2_XS, "IQ2_XS", 256, sizeof(BlockIQ2_XS), 16},
    {BlockType::kIQ3_XXS, "IQ3_XXS", 256, sizeof(BlockIQ3_XXS), 32},
    {BlockType::kIQ1_S, "IQ1_S", 256, sizeof(BlockIQ1_S), 32},
    {BlockType::kIQ4_NL, "IQ4_NL", 32, sizeof(BlockIQ4_NL), 32},
    {BlockType::kIQ3_S, "IQ3_S", 256, sizeof(BlockIQ3_S), 32},
    {BlockType::kIQ2_S, "IQ2_S", 256, sizeof(BlockIQ2_S), 16},
    {BlockType::kIQ4_XS, "IQ4_XS", 256, sizeof(BlockIQ4_XS), 32},
    {BlockType::kIQ1_M, "IQ1_M", 256, sizeof(BlockIQ1_M), 16},
    {BlockType::kBF16, "BF16", 1, 2, 1},
    // One scale for all 256; the granule is a run that lies in one digit or shift.
    {BlockType::kTQ1_0, "TQ1_0", 256, sizeof(BlockTQ1_0), 16},
    {BlockType::kTQ2_0, "TQ2_0", 256, sizeof(BlockTQ2_0), 32},
    {BlockType::kMXFP4, "MXFP4", 32, sizeof(BlockMXFP4), 32},
};

// ggml's ids in order. Some were withdrawn and some have no decoder here; a file may still carry them.
constexpr const char* kIdNames[] = {
    "F32",   "F16",        "Q4_0",       "Q4_1",       "Q4_2",     "Q4_3",     "Q5_0",
    "Q5_1",  "Q8_0",       "Q8_1",       "Q2_K",       "Q3_K",     "Q4_K",     "Q5_K",
    "Q6_K",  "Q8_K",       "IQ2_XXS",    "IQ2_XS",     "IQ3_XXS",  "IQ1_S",    "IQ4_NL",
    "IQ3_S", "IQ2_S",      "IQ4_XS",     "I8",         "I16",      "I32",      "I64",
    "F64",   "IQ1_M",      "BF16",       "Q4_0_4_4",   "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",
    "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",    "NVFP4",    "Q1_0",
};
constexpr std::size_t kIdCount = std::size(kIdNames);

constexpr std::int8_t kNone = -1;

// id -> place in kTraits, so that traits() costs one load.
constexpr std::array<std::int8_t, kIdCount> make_places() {
  std::array<std::int8_t, kIdCount> places{};
  places.fill(kNone);
  for (std::size_t i = 0; i < std::size(kTraits); ++i) {
    places[static_cast<std::size_t>(kTraits[i].type)] = static_cast<std::int8_t>(i);
  }
  return places;
}
constexpr std::array<std::int8_t, kIdCount> kPlaces = make_places();

bool same_ignoring_case(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::toupper(static_cast<unsigned char>(x)) ==
           std::toupper(static_cast<unsigned char>(y));
  });
}

}  // namespace

const BlockTraits& traits(BlockType type) {
  const std::uint32_t id = static_cast<std::uint32_t>(type);
  if (id >= kIdCount || kPlaces[id] == kNone) {
    throw std::invalid_argument("block type " + std::to_string(id) + " has no traits");
  }
  return kTraits[kPlaces[id]];
}

std::optional<BlockType> block_type_from_id(std::uint32_t id) {
  if (id >= kIdCount || kPlaces[id] == kNone) return std::nullopt;
  return kTraits[kPlaces[id]].type;
}

std::optional<BlockType> block_type_from_name(std::string_view name) {
  for (const BlockTraits& t : kTraits) {
    if (same_ignoring_case(name, t.name)) return t.type;
  }
  return std::nullopt;
}

const char* block_type_name(std::uint32_t id) {
  if (id < kIdCount) return kIdNames[id];
  // Per thread, and overwritten by the next unknown id: enough for building one message.
  thread_local char text[24];
  std::snprintf(text, sizeof text, "type %u", static_cast<unsigned>(id));
  return text;
}

}  // namespace k3
