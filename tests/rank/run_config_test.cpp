#include "rank/run_config.h"

#include <limits>
#include <set>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

namespace {

using k3::RunConfig;

RunConfig unusual() {
  RunConfig c;
  c.model = "a model with blanks.gguf";
  c.synthetic = "k3-8l";
  c.synthetic_seed = 7;
  c.ignore_split_count = true;
  c.layout = {3, 2, k3::ShardPolicy::kExpertsOnly, 3, true};
  c.comm = "mpi";
  c.precision = k3::Precision::kFast;
  c.reproducible = true;
  c.share_gpu = true;
  c.threads = 7;
  c.bind = false;
  c.cpu_kernels = "avx2";
  c.time_limit_s = 12.5;
  c.n_ctx = 1 << 20;
  c.chunk_tok = 33;
  c.n_slot = 4;
  c.cache = k3::CacheType::kBF16;
  c.n_predict = 99;
  c.control_tokens = true;
  c.ignore_eos = true;
  c.sampler.temp = 0.7f;
  c.sampler.top_k = 40;
  c.sampler.top_p = 0.9f;
  c.sampler.min_p = 0.05f;
  c.sampler.repetition_penalty = 1.1f;
  c.sampler.presence_penalty = -0.5f;
  c.sampler.seed = std::numeric_limits<std::uint64_t>::max();
  c.log = "run.h5";
  return c;
}

void refused(void (*change)(RunConfig&), const char* option) {
  RunConfig c;
  c.model = "m.gguf";
  CHECK_NOTHROW(k3::check(c));
  change(c);
  try {
    k3::check(c);
    FAIL("accepted: " << option);
  } catch (const std::invalid_argument& e) {
    CHECK_MESSAGE(std::string(e.what()).rfind(option, 0) == 0, e.what());
  }
}

TEST_CASE("cache type and time limit follow the backend unless they were given") {
  k3::RunConfig c;
  c.cache_auto = true;
  c.time_limit_s = k3::kAutoTimeLimit;
  k3::RunConfig cuda = c;
  cuda.backend = "cuda";
  k3::settle(c);
  k3::settle(cuda);
  CHECK(c.cache == k3::CacheType::kF32);
  CHECK(c.time_limit_s == 60);
  CHECK(cuda.cache == k3::CacheType::kF16);
  CHECK(cuda.time_limit_s == 10);
  cuda.cache = k3::CacheType::kBF16;
  cuda.time_limit_s = 3;
  k3::settle(cuda);
  CHECK(cuda.cache == k3::CacheType::kBF16);
  CHECK(cuda.time_limit_s == 3);
}

TEST_CASE("every field reaches the other ranks") {
  const RunConfig there = unusual();
  const RunConfig here = k3::run_config_from_bytes(k3::to_bytes(there));
  CHECK(k3::describe(here) == k3::describe(there));
  CHECK(k3::describe(here) != k3::describe(RunConfig{}));
}

TEST_CASE("every field of the unusual configuration is described otherwise than the default") {
  const auto usual = k3::describe(RunConfig{});
  const auto other = k3::describe(unusual());
  REQUIRE(usual.size() == other.size());
  std::set<std::string> same;
  for (std::size_t i = 0; i < usual.size(); ++i) {
    if (usual[i] == other[i]) same.insert(usual[i].first);
  }
  CHECK(same == std::set<std::string>{"backend"});
}

TEST_CASE("bytes that are cut short or too long are refused") {
  const std::string bytes = k3::to_bytes(unusual());
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    CHECK_THROWS_AS(k3::run_config_from_bytes(bytes.substr(0, n)), std::runtime_error);
  }
  CHECK_THROWS_AS(k3::run_config_from_bytes(bytes + "x"), std::runtime_error);
}

TEST_CASE("a value out of range is refused by the name of its option") {
  refused([](RunConfig& c) { c.model.clear(); }, "--model");
  refused([](RunConfig& c) { c.layout.tp = -1; }, "--tp -1");
  refused([](RunConfig& c) { c.layout.pp = 0; }, "--pp 0");
  refused([](RunConfig& c) { c.layout.expert_groups = -2; }, "--expert-groups -2");
  refused(
      [](RunConfig& c) {
        c.layout.tp = 4;
        c.layout.expert_groups = 3;
      },
      "--expert-groups 3");
  refused([](RunConfig& c) { c.backend = "gpu"; }, "--backend gpu");
  refused([](RunConfig& c) { c.threads = -1; }, "--threads -1");
  refused([](RunConfig& c) { c.cpu_kernels = "mmx"; }, "--cpu-kernels mmx");
  refused([](RunConfig& c) { c.time_limit_s = -1; }, "--time-limit -1");
  refused([](RunConfig& c) { c.time_limit_s = std::numeric_limits<double>::quiet_NaN(); },
          "--time-limit nan");
  refused([](RunConfig& c) { c.n_ctx = -1; }, "--ctx -1");
  refused([](RunConfig& c) { c.chunk_tok = 0; }, "--chunk 0");
  refused([](RunConfig& c) { c.n_predict = -1; }, "--predict -1");
  refused([](RunConfig& c) { c.sampler.temp = -1; }, "--temp -1");
  refused([](RunConfig& c) { c.sampler.top_p = 1.5f; }, "--top-p 1.5");
}

}  // namespace
