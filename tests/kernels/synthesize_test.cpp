// Weights made on the device are those that a file would have brought there.
#include <doctest/doctest.h>

#include <random>

#include "support/backends.h"

namespace k3 {
namespace {

constexpr std::array<std::int64_t, 3> kDims{1024, 24, 3};

std::vector<std::byte> file_bytes(const SynthTensor& recipe) {
  const BlockTraits& t = traits(recipe.type);
  const std::int64_t n_block = kDims[0] / t.elems * kDims[1] * kDims[2];
  std::vector<std::byte> out(static_cast<std::size_t>(n_block * t.bytes));
  auto* to = reinterpret_cast<std::uint8_t*>(out.data());
  for (std::int64_t i = 0; i < n_block; ++i, to += t.bytes) {
    synth_block(recipe, static_cast<std::uint64_t>(i), to, t.bytes);
  }
  return out;
}

// All matrices of w times the same x.
std::vector<float> products(Backend& b, const Weight& w) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<float> u(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(w.n_in));
  for (float& v : values) v = u(rng);
  const Matrix<float> x(b, 1, w.n_in, values), y(b, 1, w.n_mat * w.n_out);
  b.head_matmul(y, w.n_out, x, 0, w);
  return y.get();
}

// Whole; rows; a column band; a column band that begins and ends inside a block of 256; matrices.
const std::vector<HostBox>& bands() {
  static const std::vector<HostBox> all = [] {
    std::vector<HostBox> out;
    for (const auto& [begin, end] : {std::pair{std::array<std::int64_t, 3>{0, 0, 0}, kDims},
                                     {{0, 5, 0}, {1024, 17, 3}},
                                     {{256, 0, 0}, {768, 24, 3}},
                                     {{96, 3, 1}, {864, 24, 3}},
                                     {{0, 0, 2}, {1024, 24, 3}}}) {
      HostBox box;
      box.dims = kDims;
      box.begin = begin;
      box.end = end;
      out.push_back(box);
    }
    return out;
  }();
  return all;
}

}  // namespace

TEST_CASE("a synthesized band is the band that a file of the same blocks brings") {
  for_each_backend([](Backend& b) {
    for (const BlockType type : {BlockType::kF32, BlockType::kBF16, BlockType::kQ8_0,
                                 BlockType::kQ4_K, BlockType::kIQ1_S, BlockType::kMXFP4}) {
      const SynthTensor recipe{SynthKind::kMatrix, type, 12345, 0.03125f};
      const std::vector<std::byte> file = file_bytes(recipe);
      for (HostBox box : bands()) {
        box.type = type;
        CAPTURE(traits(type).name);
        CAPTURE(box.begin[0]);
        CAPTURE(box.begin[1]);
        std::vector<std::unique_ptr<DeviceBuffer>> storage;
        const Weight made = b.synthesize(box, recipe, storage);
        REQUIRE(storage.size() == 1);
        CHECK(storage[0]->bytes() == b.loaded_bytes(box));
        box.base = file.data();
        const Weight read = b.load(box, storage);
        const std::vector<float> got = products(b, made);
        CHECK(got == products(b, read));
        CHECK(got.front() != 0.0f);
        CHECK(got.front() != got.back());
        SynthTensor other = recipe;
        other.key = 54321;
        box.base = nullptr;
        CHECK(products(b, b.synthesize(box, other, storage)) != got);
      }
    }
  });
}

}  // namespace k3
