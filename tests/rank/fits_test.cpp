#include "rank/fits.h"

#include <doctest/doctest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "rank/bench_math.h"
#include "rank/plan_report.h"
#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::has;
using test::refusal;

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr std::int64_t kMillion = 1048576;

NodeProfile node(const std::string& name) {
  std::ifstream in(std::string(K3_NODE_DIR) + "/" + name + ".json");
  std::stringstream text;
  text << in.rdbuf();
  return parse_node_profile(text.str(), name);
}

FitsRequest at(const NodeProfile& n, std::int64_t n_ctx) {
  FitsRequest q;
  q.layout.tp = n.devices;
  q.state.n_ctx = n_ctx;
  return q;
}

Fits judge(const char* node_name, const char* file, std::int64_t n_ctx) {
  const NodeProfile n = node(node_name);
  return fits(sized_model(published_file(file)), n, at(n, n_ctx));
}

TEST_CASE("UD-IQ1_S is fully resident on eight H200s at a context of 1M") {
  CHECK(judge("h200x8", "UD-IQ1_S", kMillion).resident);
}

TEST_CASE("UD-IQ2_XXS is fully resident on eight H200s at a context of 1M") {
  CHECK(judge("h200x8", "UD-IQ2_XXS", kMillion).resident);
}

TEST_CASE(
    "UD-Q2_K_XL is fully resident on eight H200s at a context of 1M, with experts in two groups") {
  const Fits f = judge("h200x8", "UD-Q2_K_XL", kMillion);
  CHECK(f.resident);
  CHECK(f.expert_groups == 2);
  // Under the usual choice every rank keeps the blocks that a band's ends cut through, and 1M does not fit.
  const NodeProfile n = node("h200x8");
  FitsRequest q = at(n, kMillion);
  q.layout.expert_groups = 1;
  CHECK_FALSE(fits(sized_model(published_file("UD-Q2_K_XL")), n, q).resident);
}

TEST_CASE("UD-Q4_K_XL is resident on eight H200s at no context") {
  const Fits f = judge("h200x8", "UD-Q4_K_XL", kMillion);
  CHECK_FALSE(f.resident);
  CHECK(f.largest_ctx == 0);
}

TEST_CASE("four H200s do not hold UD-IQ1_S, however short the context and the step") {
  const NodeProfile n = node("h200x4");
  FitsRequest q = at(n, 128);
  q.chunk_tok = 128;
  const Fits f = fits(sized_model(published_file("UD-IQ1_S")), n, q);
  CHECK_FALSE(f.resident);
  CHECK(f.largest_ctx == 0);
}

TEST_CASE("three GB10 hold the width-pruned file at 8k, but not at 1M") {
  CHECK(judge("gb10x3", "Neuron-IQ1_S", 8192).resident);
  const Fits f = judge("gb10x3", "Neuron-IQ1_S", kMillion);
  CHECK_FALSE(f.resident);
  CHECK(f.largest_ctx > 8192);
}

TEST_CASE("every published file comes to its published size") {
  for (const PublishedFile& file : published_files()) {
    CAPTURE(file.name);
    const SizedModel m = sized_model(file);
    const Fits f = judge("h200x8", file.name, 4096);
    CHECK(f.file_bytes == doctest::Approx(file.bytes).epsilon(1e-3));
    // Only where the types do not tell the size are the experts scaled, and the reader is told.
    CHECK((m.expert_scale == 1) == m.caveat.empty());
    CHECK(m.expert_scale == doctest::Approx(1).epsilon(0.08));
  }
  CHECK(refusal([] { published_file("UD-Q5"); }) ==
        "--quant UD-Q5: valid: UD-IQ1_S, UD-IQ2_XXS, UD-Q2_K_XL, UD-Q4_K_XL, UD-Q8_K_XL, "
        "Neuron-IQ1_S");
}

TEST_CASE("the width-pruned file has the published bytes of every type") {
  std::map<BlockType, double> gib;
  for (const TensorInfo& t : sized_model(published_file("Neuron-IQ1_S")).tensors)
    gib[t.type] += static_cast<double>(t.bytes) / kGiB;
  CHECK(gib[BlockType::kIQ1_S] == doctest::Approx(247.632).epsilon(1e-5));
  CHECK(gib[BlockType::kQ8_0] == doctest::Approx(53.23).epsilon(1e-3));
  CHECK(gib[BlockType::kF16] == doctest::Approx(4.38).epsilon(2e-3));
  CHECK(gib[BlockType::kF32] == doctest::Approx(2.25).epsilon(0.06));
}

TEST_CASE("the largest context is resident and one more position is not; a second slot halves it") {
  const NodeProfile n = node("gb10x3");
  const SizedModel m = sized_model(published_file("Neuron-IQ1_S"));
  const std::int64_t most = fits(m, n, at(n, kMillion)).largest_ctx;
  CHECK(fits(m, n, at(n, most)).resident);
  CHECK_FALSE(fits(m, n, at(n, most + 1)).resident);
  CHECK(fits(m, n, at(n, most + 1)).largest_ctx == most);
  FitsRequest two = at(n, kMillion);
  two.state.n_slot = 2;
  // Not quite: the second one's KDA state takes room, too.
  CHECK(fits(m, n, two).largest_ctx < most / 2);
  CHECK(fits(m, n, two).largest_ctx > most / 2 - 3000);
}

TEST_CASE("where a whole step does not fit, the largest context is that of a shorter one") {
  NodeProfile n = node("gb10x3");
  const SizedModel m = sized_model(published_file("Neuron-IQ1_S"));
  const Fits whole = fits(m, n, at(n, 4096));
  // Half of what the step takes is missing.
  const double missing = (whole.worst.work - kGiB) / 2;
  n.memory_gib.value = (whole.worst.total() - missing) / kGiB + n.reserve_gib.value;
  const Fits f = fits(m, n, at(n, 4096));
  CHECK_FALSE(f.resident);
  CHECK(f.largest_ctx > 1000);
  CHECK(f.largest_ctx < 4096);
  CHECK(fits(m, n, at(n, f.largest_ctx)).resident);
}

TEST_CASE(
    "a rank's need is its weights, one row of the cache for each position, its KDA state and its "
    "work memory") {
  const NodeProfile n = node("h200x8");
  const Fits f = judge("h200x8", "UD-IQ1_S", kMillion);
  CHECK(f.budget == doctest::Approx((n.memory_gib.value - n.reserve_gib.value) * kGiB));
  CHECK(f.worst.cache == 24.0 * 576 * 2 * kMillion);  // every rank keeps whole rows: 27 GiB
  CHECK(f.worst.kda_state * 8 == doctest::Approx(443.0 * 1024 * 1024).epsilon(0.01));
  CHECK(f.worst.work > kGiB);  // the backend's workspace is in it
  const Plan plan =
      Plan::make(sized_model(published_file("UD-IQ1_S")).config,
                 sized_model(published_file("UD-IQ1_S")).tensors, at(n, 1).layout, "m");
  CHECK(f.worst.weights == static_cast<double>(rank_cost(plan, f.worst_rank).total));
  for (int r = 0; r < 8; ++r)
    CHECK(f.worst.weights >= static_cast<double>(rank_cost(plan, r).total));
}

TEST_CASE("the rank that needs most is judged, whichever it is") {
  NodeProfile n = node("h200x8");
  n.devices = n.hosts = 2;
  const PublishedFile file{"f", "k3-8l", "UD-IQ1_S", 0, ""};
  FitsRequest q = at(n, 4096);
  q.layout.tp = 1;
  q.layout.pp = 2;
  const SizedModel m = sized_model(file);
  const Fits f = fits(m, n, q);
  CHECK(f.worst_rank == 1);  // the dense layer is in the first stage
  const Plan plan = Plan::make(m.config, m.tensors, q.layout, "m");
  CHECK(f.worst.weights == static_cast<double>(rank_cost(plan, 1).total));
  CHECK(rank_cost(plan, 1).total > rank_cost(plan, 0).total);
}

TEST_CASE(
    "a file whose types tell too little is taken at its published size, in memory and in both "
    "walls") {
  NodeProfile n = node("h200x8");
  n.devices = n.hosts = 1;
  FitsRequest q = at(n, 4096);
  q.chunk_tok = 16;  // so short that bytes bind prefill
  const SizedModel scaled = sized_model(published_file("UD-IQ2_XXS"));
  SizedModel plain = scaled;
  plain.expert_scale = 1;
  const Fits a = fits(scaled, n, q), b = fits(plain, n, q);
  const double less = b.file_bytes - a.file_bytes;
  CHECK(less > 40 * kGiB);
  CHECK(b.worst.weights - a.worst.weights == doctest::Approx(less));
  CHECK(b.decode_ms - a.decode_ms == doctest::Approx(less * 16 / 896 / 4410e6));
  CHECK(a.prefill_tok_s > 1.03 * b.prefill_tok_s);
}

TEST_CASE(
    "as the CUDA kernels lay it out a ternary weight takes 2.1875 bits, and an unscaled type its "
    "own") {
  NodeProfile n = node("h200x8");
  n.devices = n.hosts = 1;
  const auto experts = [&](const char* quant, Placement placement) {
    const PublishedFile file{"f", "k3-8l", quant, 0, ""};
    const PublishedFile none{"f", "k3-8l", "experts=F32,other=Q8_0", 0, ""};
    FitsRequest q = at(n, 4096);
    q.placement = placement;
    const double n_weight = 7 * 3 * 896 * 3584.0 * 3072;
    const double others = fits(sized_model(none), n, q).worst.weights - n_weight * 4;
    return (fits(sized_model(file), n, q).worst.weights - others) * 8 / n_weight;
  };
  CHECK(experts("UD-IQ1_S", Placement::kFile) == doctest::Approx(1.5625));
  // Rows of 3584 take 896 + 64 + 32 bytes, of 3072 768 + 48 + 32.
  CHECK(experts("UD-IQ1_S", Placement::kCuda) ==
        doctest::Approx(8 * (2 * 992.0 / 3584 + 848.0 / 3072) / 3).epsilon(1e-6));
  CHECK(experts("UD-Q4_K_XL", Placement::kCuda) == doctest::Approx(4.25).epsilon(2e-3));
}

TEST_CASE(
    "the decode wall is the bytes of a token over the measured bandwidth, scaled experts "
    "included") {
  const NodeProfile n = node("h200x8");
  const SizedModel m = sized_model(published_file("UD-IQ2_XXS"));
  const FitsRequest q = at(n, 131072);
  const Fits f = fits(m, n, q);
  const Plan plan = Plan::make(m.config, m.tensors, q.layout, "m");
  CHECK(f.decode_ms ==
        doctest::Approx(serial_bytes(plan, 0, CacheType::kF16, m.expert_scale) / 4410e6));
  CHECK(f.decode_ms < floor_ms(serial_bytes(plan, 0, CacheType::kF16), 4410));
  CHECK(f.decode_ms_at_ctx - f.decode_ms == doctest::Approx(24.0 * 1152 * 131071 / 4410e6));
  REQUIRE(f.collective_ms);
  CHECK(*f.collective_ms ==
        doctest::Approx(371 * 2.41e-3));  // four a layer, two in the dense one, the embedding's
}

TEST_CASE("prefill of eight H200s comes to the wall that performance work is held to") {
  // 205 GFLOP a token over 8 x 790 TFLOP/s: 30 000 tok/s, less the attention over a prompt of 32k.
  const Fits f = judge("h200x8", "UD-IQ1_S", kMillion);
  CHECK(f.prefill_tok_s == doctest::Approx(27500).epsilon(0.04));
}

TEST_CASE(
    "a refusal says what is needed, what there is, and the context or the devices that would do") {
  const NodeProfile n = node("gb10x3");
  const SizedModel m = sized_model(published_file("Neuron-IQ1_S"));
  FitsRequest q = at(n, kMillion);
  Fits f = fits(m, n, q);
  const std::string line = refusal_line(m, n, q, f);
  CHECK(has(line, "gb10x3: Neuron-IQ1_S at --ctx 1048576 would not be fully resident: rank "));
  CHECK(has(line, "the largest context that fits is --ctx " + std::to_string(f.largest_ctx)));

  const NodeProfile four = node("h200x4");
  const SizedModel one = sized_model(published_file("UD-IQ1_S"));
  q = at(four, 4096);
  f = fits(one, four, q);
  CHECK(has(refusal_line(one, four, q, f), "no context fits; 5 such devices would hold it"));
  NodeProfile five = four;
  five.devices = five.hosts = q.layout.tp = 5;
  CHECK(fits(one, five, q).resident);
}

TEST_CASE("a context beyond the model's and a layout of another world are refused") {
  const NodeProfile n = node("h200x8");
  const SizedModel m = sized_model(published_file("UD-IQ1_S"));
  CHECK(refusal([&] { fits(m, n, at(n, kMillion + 1)); }) ==
        "--ctx 1048577: valid: 1 to 1048576, the model's limit");
  FitsRequest q = at(n, 4096);
  q.layout.tp = 4;
  CHECK(refusal([&] { fits(m, n, q); }) == "--tp 4 --pp 1: needs 4 devices, h200x8 has 8");
}

}  // namespace
