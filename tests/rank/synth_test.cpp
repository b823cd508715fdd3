#include "rank/synth.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>

#include "comm/thread_comm.h"
#include "kernels/cpu/dequant.h"
#include "loader/parts.h"
#include "rank/engine.h"
#include "rank/tokenizer.h"
#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::has;
using test::refusal;
namespace fs = std::filesystem;

// A folder that goes with the test.
class Scratch {
 public:
  Scratch() : dir_(fs::temp_directory_path() / ("k3_synth_" + std::to_string(::getpid()))) {
    fs::create_directories(dir_);
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(dir_, ignored);
  }
  std::string path(const std::string& name) const { return (dir_ / name).string(); }

 private:
  fs::path dir_;
};

std::string read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

constexpr const char* kTypes[] = {
    "F32",   "F16",   "BF16",   "Q4_0",   "Q4_1",    "Q5_0",   "Q5_1",  "Q8_0",    "Q2_K",
    "Q3_K",  "Q4_K",  "Q5_K",   "Q6_K",   "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0",   "TQ2_0",  "MXFP4"};

std::vector<float> values_of(const SynthTensor& t, std::uint64_t first, std::uint64_t n_block) {
  const BlockTraits& tr = traits(t.type);
  std::vector<std::uint16_t> aligned(n_block * static_cast<std::uint64_t>(tr.bytes) / 2 + 1);
  auto* bytes = reinterpret_cast<std::uint8_t*>(aligned.data());
  for (std::uint64_t i = 0; i < n_block; ++i) {
    synth_block(t, first + i, bytes + i * static_cast<std::uint64_t>(tr.bytes), tr.bytes);
  }
  std::vector<float> out(n_block * static_cast<std::uint64_t>(tr.elems));
  dequantize(t.type, reinterpret_cast<const std::byte*>(bytes), out.data(),
             static_cast<std::int64_t>(out.size()));
  return out;
}

TEST_CASE("blocks of every type decode to mean 0 and the standard deviation asked for") {
  for (const char* name : kTypes) {
    CAPTURE(name);
    const BlockType type = *block_type_from_name(name);
    for (const float sigma : {1.0f, 0.0118f}) {
      const SynthTensor t{SynthKind::kMatrix, type, synth_key(3, name, std::strlen(name)), sigma};
      const auto v = values_of(t, 0, 150'000 / static_cast<std::uint64_t>(traits(type).elems));
      double sum = 0, square = 0;
      for (const float x : v) {
        sum += x;  // a NaN or an infinity would end up in the sums
        square += static_cast<double>(x) * x;
      }
      const auto n = static_cast<double>(v.size());
      CHECK(std::abs(sum / n) < 0.02 * sigma);
      CHECK(std::sqrt(square / n) == doctest::Approx(sigma).epsilon(0.02));
    }
  }
}

TEST_CASE("every type that this runtime decodes can be made") {
  std::set<std::string> made(std::begin(kTypes), std::end(kTypes));
  for (std::uint32_t id = 0; id < 64; ++id) {
    if (const auto type = block_type_from_id(id)) CHECK(made.contains(traits(*type).name));
  }
}

TEST_CASE("a block depends on seed, tensor, index and nothing else") {
  const BlockType type = BlockType::kIQ1_S;
  const auto of = [&](std::uint64_t seed, const std::string& name, std::uint64_t block) {
    return values_of({SynthKind::kMatrix, type, synth_key(seed, name.data(), name.size()), 1.0f},
                     block, 1);
  };
  CHECK(of(1, "blk.1.a", 7) == of(1, "blk.1.a", 7));
  CHECK(of(1, "blk.1.a", 7) != of(2, "blk.1.a", 7));
  CHECK(of(1, "blk.1.a", 7) != of(1, "blk.2.a", 7));
  CHECK(of(1, "blk.1.a", 7) != of(1, "blk.1.a", 8));
}

TEST_CASE("the same options give the same file, and threads change nothing") {
  const Scratch dir;
  SynthOptions o;
  o.shape = named_shape("tiny");
  write_synthetic(dir.path("one.gguf"), o);
  o.threads = 3;
  write_synthetic(dir.path("three.gguf"), o);
  CHECK(read_all(dir.path("one.gguf")) == read_all(dir.path("three.gguf")));
  o.seed = 2;
  write_synthetic(dir.path("other.gguf"), o);
  CHECK(read_all(dir.path("one.gguf")) != read_all(dir.path("other.gguf")));
}

TEST_CASE("experts of a layer differ from each other") {
  const Scratch dir;
  SynthOptions o;
  o.shape = named_shape("tiny");
  write_synthetic(dir.path("m.gguf"), o);
  const ModelFile file = ModelFile::open(dir.path("m.gguf"));
  const TensorInfo& t = *file.find("blk.1.ffn_up_exps.weight");
  const std::size_t size = t.bytes / 12;
  std::set<std::string> experts;
  for (std::size_t e = 0; e < 12; ++e) {
    experts.emplace(reinterpret_cast<const char*>(file.data(t)) + e * size, size);
  }
  CHECK(experts.size() == 12);
}

TEST_CASE("a split model holds the same tensors as a whole one") {
  const Scratch dir;
  SynthOptions o;
  o.shape = named_shape("tiny");
  write_synthetic(dir.path("whole.gguf"), o);
  o.file.max_part_tensors = 50;
  o.file.metadata_part = true;
  const auto parts = write_synthetic(dir.path("split.gguf"), o);
  CHECK(parts.size() == 4);
  const ModelFile whole = ModelFile::open(dir.path("whole.gguf"));
  const ModelFile split = ModelFile::open(parts[2]);
  REQUIRE(split.tensors().size() == whole.tensors().size());
  for (const TensorInfo& t : whole.tensors()) {
    const TensorInfo* s = split.find(t.name);
    REQUIRE(s != nullptr);
    CHECK(std::memcmp(whole.data(t), split.data(*s), t.bytes) == 0);
  }
}

TEST_CASE("the header of the real model is written and read back whole") {
  const Scratch dir;
  SynthOptions o;
  o.shape = named_shape("k3-full");
  o.file.header_only = true;
  const auto paths = write_synthetic(dir.path("full.gguf"), o);
  CHECK(fs::file_size(paths.at(0)) < (16u << 20));
  OpenOptions open;
  open.header_only = true;
  const ModelFile file = ModelFile::open(paths[0], open);
  CHECK(file.tensors().size() == 2573);
  CHECK(file.tensor_bytes() == 593'990'834'560u);
  std::vector<std::string> dialects;
  const ModelConfig c = read_model_config(file.metadata(), file.tensors(), paths[0], dialects);
  CHECK(dialects.empty());
  CHECK(c.n_vocab == 163840);
  const Plan plan = Plan::make(c, file.tensors(), {8, 1, ShardPolicy::kFull, 0}, paths[0]);
  CHECK_NOTHROW(plan.check_tiling());
}

TEST_CASE("a shape that could not be read back is not written") {
  const Scratch dir;
  SynthOptions o;
  o.shape = named_shape("tiny");
  o.shape.n_vocab = 100;
  CHECK(has(refusal([&] { write_synthetic(dir.path("m.gguf"), o); }), "vocabulary 100"));
  CHECK_FALSE(fs::exists(dir.path("m.gguf")));
}

Metadata vocabulary(std::int64_t n) {
  Metadata m("vocab");
  for (auto& [key, value] : synth_vocabulary(n)) m.add(key, std::move(value));
  return m;
}

TEST_CASE("text encodes and decodes with the synthetic vocabulary") {
  for (const std::int64_t n : {288, 512, 4096, 163840}) {
    const Tokenizer t(read_vocab(vocabulary(n), "vocab"));
    CHECK(t.n_vocab() == n);
    const std::string text = "The quick brown fox: don't panic, 42! \xc3\xa9\xe4\xb8\xad\n\xff";
    const auto ids = t.encode(text, ControlText::kAsText);
    CHECK(t.decode(ids) == text);
    CHECK((ids.size() < text.size()) == (n > 288));
  }
}

TEST_CASE("control tokens lie where the real vocabulary has them") {
  const Tokenizer t(read_vocab(vocabulary(163840), "vocab"));
  CHECK(t.find_control("[BOS]") == 163584);
  CHECK(t.find_control("[EOS]") == 163585);
  CHECK(t.find_control("<|end_of_msg|>") == 163586);
  CHECK(t.find_control("<|sep|>") == 163589);
  CHECK(t.find_control("<|media_pad|>") == 163605);
  CHECK(t.find_control("[PAD]") == 163839);
  CHECK(t.is_stop(163585));
  CHECK(t.is_stop(163586));
  CHECK(t.encode("\n", ControlText::kAsText) == std::vector<std::int32_t>{198});
  CHECK(t.encode("!", ControlText::kAsText) == std::vector<std::int32_t>{0});
}

TEST_CASE(
    "each merge joins two earlier tokens to the next one, and joining by rank reaches every "
    "token") {
  const Metadata m = vocabulary(30'000);
  const Tokenizer t(read_vocab(m, "vocab"));
  const auto& tokens = *m.strings("tokenizer.ggml.tokens");
  const auto& merges = *m.strings("tokenizer.ggml.merges");
  REQUIRE(merges.size() == 30'000 - 256 - 256);
  std::set<std::string> known(tokens.begin(), tokens.begin() + 256);
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const std::size_t blank = merges[i].find(' ');
    const std::string left = merges[i].substr(0, blank), right = merges[i].substr(blank + 1);
    REQUIRE(known.contains(left));
    REQUIRE(known.contains(right));
    REQUIRE(left + right == tokens[256 + i]);
    REQUIRE(known.insert(tokens[256 + i]).second);
  }
  for (std::int32_t id = 0; id < 30'000 - 256; id += 37) {
    if (id >= 188 && id < 256) continue;  // halves of characters are pieces of their own
    CHECK(t.encode(t.bytes(id), ControlText::kAsText) == std::vector<std::int32_t>{id});
  }
}

// Logits of 24 tokens at one rank.
std::vector<float> logits_of(const std::string& path, int tp) {
  std::vector<float> out;
  run_ranks(tp, [&](Comm& comm) {
    RunConfig config;
    config.model = path;
    config.layout.tp = tp;
    config.n_ctx = 64;
    config.threads = 1;
    const auto backend = make_cpu_backend(1);
    Engine engine(config, comm, *backend);
    if (comm.rank() != 0) {
      engine.serve();
      return;
    }
    std::vector<std::int32_t> ids(24);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 19 % 480);
    engine.logits(0, ids, false, [&](std::span<const float> rows, std::int64_t) {
      out.insert(out.end(), rows.begin(), rows.end());
    });
    engine.stop();
  });
  return out;
}

TEST_CASE(
    "tiny models of different types run through the whole model to logits of deviation near 3") {
  const Scratch dir;
  for (const char* quant : {"UD-IQ1_S", "UD-Q8_K_XL", "experts=IQ2_XXS,other=Q4_K", "Q3_K"}) {
    CAPTURE(quant);
    SynthOptions o;
    o.shape = named_shape("tiny");
    o.recipe = QuantRecipe::parse(quant);
    write_synthetic(dir.path("m.gguf"), o);
    const std::vector<float> v = logits_of(dir.path("m.gguf"), 1);
    REQUIRE(v.size() == 24 * 512);
    double square = 0;
    std::set<std::ptrdiff_t> top;
    for (std::size_t row = 0; row < 24; ++row) {
      const auto first = v.begin() + static_cast<std::ptrdiff_t>(row * 512);
      top.insert(std::max_element(first, first + 512) - first);
    }
    for (const float x : v) {
      square += static_cast<double>(x) * x;
    }
    CHECK(std::sqrt(square / static_cast<double>(v.size())) == doctest::Approx(3.0).epsilon(0.15));
    CHECK(top.size() > 8);  // not one answer for all positions
  }
}

TEST_CASE("a shape that divides by nothing gives three ranks the logits of one") {
  const Scratch dir;
  SynthOptions o;
  o.shape = named_shape("tiny");
  o.shape.n_head = 5;
  o.shape.n_expert = 7;
  o.shape.ffn_expert = 96;
  o.shape.moe_latent = 160;
  o.recipe = QuantRecipe::parse("Q8_0");
  write_synthetic(dir.path("m.gguf"), o);
  const std::vector<float> one = logits_of(dir.path("m.gguf"), 1);
  const std::vector<float> three = logits_of(dir.path("m.gguf"), 3);
  REQUIRE(one.size() == three.size());
  float worst = 0;
  for (std::size_t i = 0; i < one.size(); ++i) worst = std::max(worst, std::abs(one[i] - three[i]));
  CHECK(worst < 1e-3f);
}

}  // namespace
