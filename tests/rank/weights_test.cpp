#include "rank/weights.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "comm/thread_comm.h"
#include "poked_model.h"
#include "rank/engine.h"
#include "rank/synth.h"
#include "tests/support/resident.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

struct Loaded {
  ModelFile file;
  Plan plan;
  std::vector<std::string> warnings;
};

Loaded open(const std::string& path, int tp, int expert_groups = 0) {
  ModelFile file = ModelFile::open(path);
  std::vector<std::string> dialects;
  const ModelConfig config = read_model_config(file.metadata(), file.tensors(), path, dialects);
  Layout layout;
  layout.tp = tp;
  layout.expert_groups = expert_groups;
  Plan plan = Plan::make(config, file.tensors(), layout, path);
  return {std::move(file), std::move(plan), {}};
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("a rank has its band of the file resident and next to nothing of the others'") {
  ModelShape shape = named_shape("tiny");
  shape.ffn_dense = 65536;  // tens of MB in three matrices: two cut by rows, one by columns
  const PokedModel model(shape);
  constexpr int kRanks = 4;
  Loaded m = open(model.path(), kRanks);
  const auto backend = make_cpu_backend(1);
  const Weights weights(m.plan, FileWeights(m.file), *backend, 1, {}, m.warnings);
  // Use all that is mapped, as a step would.
  double sum = 0;
  for (const Role role : {Role::kDenseGate, Role::kDenseUp}) {
    const Weight& w = weights.matrix(role, 0);
    for (std::int64_t r = 0; r < w.n_out; ++r) {
      sum += reinterpret_cast<const float*>(w.data + r * w.row_bytes)[0];
    }
  }
  CHECK(std::isfinite(sum));
  std::uint64_t band = 0;
  for (const PlannedTensor& t : m.plan.tensors()) band += m.plan.band_bytes(t, 1);
  const std::uint64_t resident = resident_bytes(m.file.data(m.file.tensors().front()));
  const std::uint64_t whole = m.file.tensor_bytes();
  CAPTURE(resident);
  CAPTURE(band);
  REQUIRE(whole > 3 * band);  // else the next line says nothing
  CHECK(resident < band + (whole - band) / 10);
}

TEST_CASE("a rank that holds a strip of every expert has no other strips resident") {
  ModelShape shape = named_shape("tiny");
  shape.n_expert = 96;
  shape.moe_latent = 256;
  shape.ffn_expert = 256;  // strips of 64 KiB: what a page fault maps around itself
  const PokedModel model(shape);
  Loaded m = open(model.path(), 4, 1);
  const auto backend = make_cpu_backend(1);
  const Weights weights(m.plan, FileWeights(m.file), *backend, 1, {}, m.warnings);
  const int layer = static_cast<int>(m.plan.config().n_layer) - 1;
  double sum = 0;
  for (const Role role : {Role::kExpertGate, Role::kExpertUp}) {
    const Weight& w = weights.matrix(role, layer);
    for (std::int64_t row = 0; row < w.n_mat * w.n_out; ++row) {
      const std::byte* at = w.data + row / w.n_out * w.mat_bytes + row % w.n_out * w.row_bytes;
      sum += reinterpret_cast<const float*>(at)[0];
    }
  }
  CHECK(std::isfinite(sum));
  std::uint64_t band = 0;
  for (const PlannedTensor& t : m.plan.tensors()) band += m.plan.band_bytes(t, 1);
  const std::uint64_t resident = resident_bytes(m.file.data(m.file.tensors().front()));
  CAPTURE(resident);
  CAPTURE(band);
  REQUIRE(m.file.tensor_bytes() > 3 * band);
  CHECK(resident < band + band / 10);
}

TEST_CASE("a NaN or an infinity in a vector is refused, naming file, tensor and element") {
  const PokedModel model(named_shape("tiny"));
  for (const auto& [tensor, value] : {std::pair<const char*, float>{"blk.1.attn_norm.weight", kNan},
                                      {"output_norm.weight", kInf},
                                      {"blk.1.exp_probs_b.bias", -kInf},
                                      {"blk.0.ssm_conv1d_k.weight", kNan}}) {
    const auto& name = tensor;  // clang 14 cannot capture a structured binding
    CAPTURE(name);
    const ModelFile before = ModelFile::open(model.path());
    const float was = reinterpret_cast<const float*>(before.data(*before.find(tensor)))[2];
    model.poke(tensor, 2, value);
    Loaded m = open(model.path(), 1);
    const auto backend = make_cpu_backend(1);
    const auto load = [&] { Weights(m.plan, FileWeights(m.file), *backend, 0, {}, m.warnings); };
    CHECK_THROWS_WITH_AS(load(), doctest::Contains(tensor), std::invalid_argument);
    CHECK_THROWS_WITH_AS(load(), doctest::Contains("element 2 is"), std::invalid_argument);
    model.poke(tensor, 2, was);
  }
}

TEST_CASE("a positive ssm_a is negated with a warning, a proper one taken as it is") {
  const PokedModel model(named_shape("tiny"));
  const auto backend = make_cpu_backend(1);
  Loaded proper = open(model.path(), 1);
  const Weights good(proper.plan, FileWeights(proper.file), *backend, 0, {}, proper.warnings);
  CHECK(proper.warnings.empty());
  const float a = good.vec(Role::kKdaA, 0)[1];
  CHECK(a < 0);
  model.poke("blk.0.ssm_a", 1, -a);
  Loaded positive = open(model.path(), 1);
  const Weights mended(positive.plan, FileWeights(positive.file), *backend, 0, {},
                       positive.warnings);
  CHECK(mended.vec(Role::kKdaA, 0)[1] == a);
  REQUIRE(positive.warnings.size() == 1);
  CHECK(positive.warnings[0].find("blk.0.ssm_a") != std::string::npos);
}

TEST_CASE("logits that are not finite end the run, naming the first layer, at one and two ranks") {
  const PokedModel model(named_shape("tiny"));
  // A matrix is not looked through at load: its NaN shows when it is used.
  model.poke("blk.2.attn_output.weight", 5, kNan);
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Comm& world) {
      RunConfig c;
      c.model = model.path();
      c.layout.tp = ranks;
      const auto backend = make_cpu_backend(1);
      Engine engine(c, world, *backend);
      if (world.rank() != 0) {
        engine.serve();
        return;
      }
      SamplerOptions greedy;
      greedy.temp = 0;
      const std::int32_t ids[] = {1, 2, 3};
      CHECK_THROWS_WITH_AS(engine.extend(0, ids, greedy, 0, false), doctest::Contains("layer 2"),
                           NonFiniteError);
      engine.stop();
    });
  }
}

}  // namespace k3
