// k3-nano's perplexity on held-out text against the reference's.
#include "rank/perplexity.h"

#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <string>

#include <nlohmann/json.hpp>

#include "comm/thread_comm.h"
#include "loader/parts.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

std::string read_data(const char* name) {
  std::ifstream in(std::string(K3_TEST_DATA) + "/k3-nano/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Perplexity nano_perplexity(int ranks) {
  Perplexity p;
  run_ranks(ranks, [&](Comm& world) {
    RunConfig c;
    c.model = K3_NANO_PATH;
    c.layout.tp = ranks;
    c.n_ctx = 512;
    const auto backend = make_cpu_backend(ranks == 1 ? 2 : 1);
    Engine engine(c, world, *backend);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    const Tokenizer tokenizer(read_vocab(engine.file().metadata(), c.model));
    const std::vector<std::int32_t> ids =
        tokenizer.encode(read_data("heldout.txt"), ControlText::kAsText);
    p = perplexity(engine, ids, 512);
    engine.stop();
  });
  return p;
}

}  // namespace

TEST_CASE(
    "k3-nano's perplexity on held-out text is the reference's within 0.1 %, on one rank and "
    "three") {
  const nlohmann::json golden =
      nlohmann::json::parse(read_data("k3-nano.goldens.json")).at("perplexity");
  const nlohmann::json& exact = golden.at("same_weights_f32_arithmetic");
  for (const int ranks : {1, 3}) {
    CAPTURE(ranks);
    const Perplexity p = nano_perplexity(ranks);
    CHECK(p.n_window == exact.at("chunks").get<std::int64_t>());
    CHECK(p.n_token == 255 * p.n_window);
    CHECK(std::abs(p.value / exact.at("ppl").get<double>() - 1) < 1e-3);
    CHECK(std::abs(p.error / exact.at("plus_minus").get<double>() - 1) < 2e-2);
  }
}

TEST_CASE("the error is the standard error of the mean, carried to the value") {
  PerplexitySum sum;
  for (const double x : {1.0, 2.0, 3.0, 4.0}) sum.add(x);
  sum.end_window();
  const Perplexity p = sum.result();
  CHECK(p.value == doctest::Approx(std::exp(2.5)));
  CHECK(p.error == doctest::Approx(std::exp(2.5) * std::sqrt(1.25 / 3)));
}

}  // namespace k3
