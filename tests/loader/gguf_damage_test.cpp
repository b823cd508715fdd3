// Real files, whole and damaged: they load, or are refused in one line; nothing else may happen (sanitizers watch).
#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "loader/gguf.h"
#include "loader/parts.h"
#include "tests/loader/gguf_bytes.h"

namespace k3 {

using test::read_bytes;
using test::refusal_of;

namespace {

const std::string kModels = K3_TEST_DATA "/models/";

std::vector<std::string> sidecars() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(kModels)) {
    if (entry.path().extension() == ".json") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// A file that read_gguf accepts keeps its promises.
void check_promises(const GgufHeader& h, std::uint64_t file_size) {
  for (const TensorInfo& t : h.tensors) {
    REQUIRE(t.bytes > 0);
    REQUIRE(t.offset % h.alignment == 0);
    REQUIRE(t.offset >= h.header_bytes);
    REQUIRE(t.offset + t.bytes <= file_size);
    REQUIRE(t.bytes == block_bytes(t.type, static_cast<std::uint64_t>(t.n_elem())));
  }
}

void load_or_refuse(std::span<const std::byte> bytes) {
  const MemorySource source(bytes);
  const std::string line = refusal_of([&] { check_promises(read_gguf(source), source.size()); });
  if (!line.empty()) REQUIRE(line.starts_with("memory: "));
}

}  // namespace

TEST_CASE("every fixture, single or split, loads with the types and keys its sidecar states") {
  const std::vector<std::string> paths = sidecars();
  CHECK(paths.size() == 14);
  for (const std::string& path : paths) {
    CAPTURE(path);
    std::ifstream in(path);
    const nlohmann::json sidecar = nlohmann::json::parse(in);
    const ModelFile m = ModelFile::open(kModels + sidecar["files"][0]["name"].get<std::string>());
    CHECK(m.warnings().empty());
    CHECK(m.parts().size() == sidecar["files"].size());
    CHECK(m.bytes() == sidecar["bytes"].get<std::uint64_t>());

    std::map<std::string, int> types;
    for (const TensorInfo& t : m.tensors()) {
      ++types[traits(t.type).name];
      CHECK(m.find(t.name) == &t);
      CHECK(reinterpret_cast<std::uintptr_t>(m.data(t)) % 8 == 0);
    }
    CHECK(types == sidecar["tensor_types"].get<std::map<std::string, int>>());

    for (const auto& [key, value] : sidecar["hparams"].items()) {
      const auto& name = key;  // clang 14 cannot capture a structured binding
      CAPTURE(name);
      const std::string full = "kimi-k3." + key;
      if (value.is_array()) {
        CHECK(m.metadata().get_array<std::int64_t>(full) == value.get<std::vector<std::int64_t>>());
      } else if (value.is_boolean()) {
        CHECK(m.metadata().get<bool>(full) == value.get<bool>());
      } else {
        CHECK(m.metadata().get<double>(full) == value.get<double>());
      }
    }
    CHECK(m.metadata().strings("tokenizer.ggml.tokens")->size() == 352);
  }
}

TEST_CASE("a file truncated at any of 50 random places is refused") {
  std::mt19937 random(50);
  const std::vector<std::byte> whole = read_bytes(kModels + "k3-legacy.gguf");
  const GgufHeader h = read_gguf(MemorySource(whole));
  std::uint64_t last = 0;
  for (const TensorInfo& t : h.tensors) last = std::max(last, t.offset + t.bytes);
  for (int i = 0; i < 50; ++i) {
    // Every other cut falls into the header, where most of the parsing is.
    const std::uint64_t limit = i % 2 == 0 ? h.header_bytes : last;
    const std::size_t cut = static_cast<std::size_t>(random() % limit);
    CAPTURE(cut);
    const MemorySource source{std::span(whole).first(cut), "cut.gguf"};
    CHECK(refusal_of([&] { read_gguf(source); }).starts_with("cut.gguf: "));
  }
  CHECK_NOTHROW(read_gguf(MemorySource(std::span(whole).first(static_cast<std::size_t>(last)))));
}

TEST_CASE("a file with any header byte damaged loads or is refused, and keeps its promises") {
  const std::vector<std::byte> whole = read_bytes(kModels + "k3-split3-f32-00002-of-00003.gguf");
  const std::size_t header = read_gguf(MemorySource(whole)).header_bytes;
  std::vector<std::byte> damaged = whole;
  for (std::size_t at = 0; at < header; ++at) {
    for (const unsigned flip : {0x01u, 0x80u, 0xffu}) {
      damaged[at] = whole[at] ^ static_cast<std::byte>(flip);
      CAPTURE(at);
      CAPTURE(flip);
      load_or_refuse(damaged);
    }
    damaged[at] = whole[at];
  }
}

TEST_CASE("a file with several damaged fields loads or is refused, and keeps its promises") {
  std::mt19937 random(7);
  const std::vector<std::byte> whole =
      read_bytes(kModels + "k3-split3-meta-q8-00001-of-00003.gguf");
  constexpr std::uint64_t kWild[] = {0,
                                     1,
                                     0x7fffffff,
                                     0xffffffff,
                                     std::uint64_t{1} << 60,
                                     ~std::uint64_t{0},
                                     std::uint64_t{1} << 63};
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> damaged = whole;
    const int hits = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < hits; ++i) {
      const std::size_t at = random() % (damaged.size() - 8);
      const std::uint64_t wild = kWild[random() % std::size(kWild)];
      std::memcpy(damaged.data() + at, &wild, 1 + random() % 8);
    }
    if (random() % 4 == 0) damaged.resize(random() % damaged.size());
    CAPTURE(round);
    load_or_refuse(damaged);
  }
}

}  // namespace k3
