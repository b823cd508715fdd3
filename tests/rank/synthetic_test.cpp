// An engine over weights that no file holds computes what it would compute from the file.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>

#include "comm/thread_comm.h"
#include "rank/engine.h"
#include "rank/synth.h"
#include "tests/support/backends.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSpec = "tiny,layers=4,heads=6,experts=7";

using MakeBackend = std::function<std::unique_ptr<Backend>()>;

// Logits after a few ids, all rows.
std::vector<float> logits_of(const RunConfig& asked, int ranks, const MakeBackend& make) {
  std::vector<float> out;
  run_ranks(ranks, [&](Comm& world) {
    RunConfig c = asked;
    c.layout.tp = ranks;
    const auto backend = make();
    Engine engine(c, world, *backend);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    const std::int32_t ids[] = {1, 400, 7, 7, 33};
    engine.logits(0, ids, false, [&](std::span<const float> rows, std::int64_t) {
      out.insert(out.end(), rows.begin(), rows.end());
    });
    engine.stop();
  });
  return out;
}

RunConfig synthetic(std::uint64_t seed) {
  RunConfig c;
  c.synthetic = kSpec;
  c.synthetic_seed = seed;
  return c;
}

// The file that k3synth writes for the same words.
class File {
 public:
  explicit File(std::uint64_t seed)
      : path_(fs::temp_directory_path() /
              ("k3_synthetic_" + std::to_string(::getpid()) + ".gguf")) {
    SynthOptions o;
    const SynthModel m = parse_synth_model(kSpec);
    o.shape = m.shape;
    o.recipe = m.recipe;
    o.seed = seed;
    write_synthetic(path_.string(), o);
    config.model = path_.string();
  }
  ~File() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  RunConfig config;

 private:
  fs::path path_;
};

}  // namespace

TEST_CASE("weights from a seed give the logits of the file that k3synth writes with it") {
  const File file(5);
  for (const BackendUnderTest& b : backends_under_test()) {
    for (const int ranks : {1, 3}) {
      if (ranks > 1 && b.name == "cuda") continue;  // rank threads share host memory only
      CAPTURE(b.name);
      CAPTURE(ranks);
      const std::vector<float> want = logits_of(file.config, ranks, b.make);
      REQUIRE(want.size() == 5 * 512);
      CHECK(logits_of(synthetic(5), ranks, b.make) == want);
      CHECK(logits_of(synthetic(6), ranks, b.make) != want);
    }
  }
}

TEST_CASE("ranks that were given different seeds are told that they see different models") {
  const auto run = [] {
    run_ranks(2, [](Comm& world) {
      RunConfig c = synthetic(static_cast<std::uint64_t>(world.rank()));
      c.layout.tp = 2;
      const auto backend = make_cpu_backend(1);
      Engine engine(c, world, *backend);
    });
  };
  CHECK_THROWS_WITH_AS(run(), doctest::Contains("the ranks see different files"), AgreedFault);
}

TEST_CASE("a synthetic model's words are a preset, sizes by k3synth's names, and a recipe") {
  const SynthModel m = parse_synth_model("k3-8l,layers=5,quant=Q8_0");
  CHECK(m.shape.n_layer == 5);
  CHECK(m.shape.hidden == 7168);
  CHECK(m.recipe.name() == "Q8_0");
  CHECK(parse_synth_model("k3-full").shape.n_layer == 93);
  for (const char* wrong : {"", "k3-7l", "tiny,", "tiny,layers", "tiny,layers=", "tiny,layers=-1",
                            "tiny,layers=2x", "tiny,depth=3", "tiny,quant=Q9"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(parse_synth_model(wrong), std::invalid_argument);
  }
}

TEST_CASE("an outline has tensors and no data") {
  const ModelFile m = synthetic_outline("tiny", 3);
  CHECK(m.find("output.weight") != nullptr);
  CHECK_THROWS_WITH_AS(m.data(*m.find("output.weight")), doctest::Contains("holds no data"),
                       std::invalid_argument);
  CHECK(m.fingerprint() == synthetic_outline("tiny", 3).fingerprint());
  CHECK(m.fingerprint() != synthetic_outline("tiny", 4).fingerprint());
}

}  // namespace k3
