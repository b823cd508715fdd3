#include "rank/plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "loader/parts.h"
#include "rank/plan_report.h"
#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::has;
using test::Outline;
using test::refusal;

std::string refused(Outline& o, const Layout& layout = {}) {
  return refusal([&] { o.plan(layout); });
}

// Nothing divides anything: 5 heads, 7 experts, widths that are no multiple of 3, 5 or 7.
ModelShape odd_shape() {
  ModelShape s = named_shape("tiny");
  s.name = "odd";
  s.hidden = 32;
  s.n_vocab = 289;
  s.n_head = 5;
  s.kda_head_dim = 8;
  s.q_latent = 0;
  s.kv_latent = 16;
  s.rope = 3;
  s.key_len = 11;
  s.value_len = 7;
  s.n_expert = 7;
  s.n_expert_used = 2;
  s.moe_latent = 22;
  s.ffn_expert = 26;
  s.ffn_dense = 37;
  s.n_layer = 4;
  return s;
}

// How often each element of a tensor is owned, counted one by one.
using BoxOf = std::function<Box(int rank)>;
bool owned_once(const PlannedTensor& t, int first, int n_rank, const BoxOf& box) {
  std::vector<int> owners(static_cast<std::size_t>(t.n_col * t.dims[1] * t.dims[2]));
  for (int r = first; r < first + n_rank; ++r) {
    const Box b = box(r);
    for (auto m = b.axis[2].begin; m < b.axis[2].end; ++m) {
      for (auto y = b.axis[1].begin; y < b.axis[1].end; ++y) {
        for (auto x = b.axis[0].begin; x < b.axis[0].end; ++x) {
          ++owners.at(static_cast<std::size_t>((m * t.dims[1] + y) * t.n_col + x));
        }
      }
    }
  }
  const int want = t.cut == Cut::kReplicate ? n_rank : 1;
  return std::all_of(owners.begin(), owners.end(), [&](int n) { return n == want; });
}

void check_element_by_element(const Plan& plan) {
  for (const PlannedTensor& t : plan.tensors()) {
    const int tp = plan.layout().tp;
    int stage = 0;
    while (plan.box(t, stage * tp).empty() && plan.box(t, stage * tp + tp - 1).empty() &&
           stage + 1 < plan.layout().pp) {
      ++stage;
    }
    CAPTURE(t.name);
    CHECK(owned_once(t, stage * tp, tp, [&](int r) { return plan.box(t, r); }));
  }
}

TEST_CASE("every element of a small odd model is owned exactly once, counted one by one") {
  for (const char* quant : {"F32", "Q8_0"}) {
    Outline o(odd_shape(), quant);
    for (int tp = 1; tp <= 16; ++tp) {
      for (const ShardPolicy policy : {ShardPolicy::kFull, ShardPolicy::kExpertsOnly}) {
        check_element_by_element(o.plan({tp, 1, policy, 0}));
      }
    }
  }
}

TEST_CASE("scale groups do not disturb the tiling of a quantized model, counted one by one") {
  ModelShape s = named_shape("tiny");
  s.n_layer = 4;
  s.n_expert = 3;
  s.n_expert_used = 2;
  Outline o(s, "experts=IQ1_S,other=Q6_K");
  for (int tp : {2, 3, 5, 8, 11}) check_element_by_element(o.plan({tp, 1, ShardPolicy::kFull, 0}));
}

TEST_CASE("a band moved by one element is seen by the count") {
  Outline o(odd_shape(), "F32");
  const Plan plan = o.plan({3, 1, ShardPolicy::kFull, 0});
  const PlannedTensor& t = *plan.find(Role::kExpertDown, 1);
  const auto moved = [&](int axis, bool begin) {
    return [&plan, &t, axis, begin](int rank) {
      Box b = plan.box(t, rank);
      Band& band = b.axis[static_cast<std::size_t>(axis)];
      if (rank == 1) (begin ? band.begin : band.end) -= 1;
      return b;
    };
  };
  CHECK(owned_once(t, 0, 3, [&](int r) { return plan.box(t, r); }));
  CHECK_FALSE(owned_once(t, 0, 3, moved(0, true)));   // an overlap
  CHECK_FALSE(owned_once(t, 0, 3, moved(0, false)));  // a gap
}

TEST_CASE("the real model tiles for every number of ranks from 1 to 16, both policies") {
  Outline o("k3");
  for (int tp = 1; tp <= 16; ++tp) {
    for (const ShardPolicy policy : {ShardPolicy::kFull, ShardPolicy::kExpertsOnly}) {
      CHECK_NOTHROW(o.plan({tp, 1, policy, 0}).check_tiling());
    }
  }
}

TEST_CASE("random shapes, types, ranks to 64, stages and expert groups tile") {
  std::mt19937 random(20);
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const char* quants[] = {"F32", "Q8_0", "UD-IQ1_S", "experts=IQ2_XS,other=Q4_K", "MXFP4"};
  for (int i = 0; i < 60; ++i) {
    ModelShape s = odd_shape();
    s.n_head = pick(1, 100);
    s.kda_head_dim = 8 * pick(1, 16);
    s.value_len = 8 * pick(1, 16);
    s.n_expert = pick(2, 900);
    s.moe_latent = 32 * pick(1, 112);
    s.ffn_expert = pick(0, 1) ? 256 * pick(1, 12) : pick(1, 3072);
    s.ffn_dense = pick(1, 9000);
    s.n_shared = pick(0, 2);
    s.n_layer = pick(2, 12);
    Outline o(s, quants[pick(0, 4)]);
    const int tp = pick(1, 64);
    int groups = pick(0, 1) ? 0 : pick(1, tp);
    while (groups > 0 && tp % groups != 0) --groups;
    const int pp = pick(1, static_cast<int>(s.n_layer));
    CAPTURE(tp);
    CAPTURE(pp);
    CAPTURE(groups);
    const Plan plan = o.plan({tp, pp, ShardPolicy::kFull, groups});
    CHECK_NOTHROW(plan.check_tiling());
    CHECK_NOTHROW(o.plan({tp, pp, ShardPolicy::kExpertsOnly, 0}).check_tiling());
    if (groups > 0) CHECK(plan.expert_groups() == groups);
  }
}

TEST_CASE(
    "64 ranks of a model with 5 heads and 7 experts: most bands are empty, and all is owned") {
  Outline o(odd_shape(), "F32");
  const Plan plan = o.plan({64, 1, ShardPolicy::kFull, 0});
  plan.check_tiling();
  int n_idle = 0;
  for (int r = 0; r < 64; ++r) n_idle += plan.heads(r, 0).empty();
  CHECK(n_idle == 59);
}

TEST_CASE("column cuts of quantized tensors end on scale groups") {
  Outline o("k3");
  for (int tp : {2, 3, 5, 7, 8, 64}) {
    const Plan plan = o.plan({tp, 1, ShardPolicy::kFull, 0});
    for (const PlannedTensor& t : plan.tensors()) {
      for (int r = 0; r < tp; ++r) {
        const Band b = plan.box(t, r).axis[0];
        CHECK_MESSAGE((b.end == t.n_col || b.end % traits(t.type).granule == 0), t.name);
      }
    }
  }
}

TEST_CASE("heads narrower than a scale group are handed out together") {
  ModelShape s = named_shape("tiny");
  s.kda_head_dim = 16;  // Q8_0 scales 32 columns of attn_output: 2 heads
  s.value_len = 8;      // 4 heads
  Outline o(s, "Q8_0");
  const Plan plan = o.plan({3, 1, ShardPolicy::kFull, 0});
  CHECK(plan.heads(0, 0) == Band{0, 2});
  CHECK(plan.heads(1, 0) == Band{2, 4});
  CHECK(plan.heads(2, 0) == Band{4, 8});
  CHECK(plan.heads(0, 3) == Band{0, 0});
  CHECK(plan.heads(1, 3) == Band{0, 4});
  CHECK(plan.heads(2, 3) == Band{4, 8});
  Outline exact(s, "F32");
  CHECK(exact.plan({3, 1, ShardPolicy::kFull, 0}).heads(1, 3) == Band{2, 5});
}

TEST_CASE("experts are cut by width first, and into groups only where the width runs out") {
  Outline k3("k3");
  CHECK(k3.plan({8, 1, ShardPolicy::kFull, 0}).expert_groups() == 1);
  CHECK(k3.plan({64, 1, ShardPolicy::kFull, 0}).expert_groups() == 1);  // 96 scale groups
  ModelShape s = named_shape("tiny");
  s.ffn_expert = 128;  // 4 scale groups of Q8_0
  Outline o(s, "Q8_0");
  CHECK(o.plan({4, 1, ShardPolicy::kFull, 0}).expert_groups() == 1);
  CHECK(o.plan({8, 1, ShardPolicy::kFull, 0}).expert_groups() == 2);
  CHECK(o.plan({7, 1, ShardPolicy::kFull, 0}).expert_groups() == 7);
  const Plan plan = o.plan({8, 1, ShardPolicy::kFull, 4});
  CHECK(plan.layout().expert_groups == 4);
  CHECK(plan.experts(5, 1) == Band{6, 9});        // group 2 of 4 over 12 experts
  CHECK(plan.expert_ffn(5, 1) == Band{64, 128});  // band 1 of 2
  CHECK(o.plan({8, 1, ShardPolicy::kExpertsOnly, 0}).expert_groups() == 8);
}

TEST_CASE("experts-only leaves everything but experts and the head whole") {
  Outline o("tiny");
  const Plan plan = o.plan({3, 1, ShardPolicy::kExpertsOnly, 0});
  for (const PlannedTensor& t : plan.tensors()) {
    const bool cut = class_of(t.role) == TensorClass::kExperts || t.role == Role::kOutput;
    CHECK_MESSAGE((t.cut == Cut::kReplicate) == !cut, t.name);
  }
  CHECK(plan.experts(1, 1) == Band{4, 8});
  CHECK(plan.expert_ffn(1, 1) == Band{0, 256});
  CHECK(plan.vocab_in(1) == Band{0, 512});
  CHECK(plan.vocab_out(1) == Band{170, 341});
}

TEST_CASE("stages are runs of layers, the first has the embedding and the last the head") {
  Outline o("k3");
  const Plan plan = o.plan({2, 4, ShardPolicy::kFull, 0});
  CHECK(plan.layers(0) == Band{0, 23});
  CHECK(plan.layers(7) == Band{69, 93});
  CHECK(plan.has_embedding(1));
  CHECK_FALSE(plan.has_embedding(2));
  CHECK(plan.has_head(6));
  CHECK(plan.box(*plan.find(Role::kTokenEmbd), 2).empty());
  CHECK(plan.box(*plan.find(Role::kOutput), 1).empty());
  CHECK(plan.heads(0, 50).empty());
  CHECK(plan.experts(0, 50).empty());
  plan.check_tiling();
}

TEST_CASE("a block cut through is read by both ranks and priced on both") {
  Outline o("k3");
  const Plan plan = o.plan({8, 1, ShardPolicy::kFull, 0});
  const PlannedTensor& t = *plan.find(Role::kExpertDown, 1);
  const std::uint64_t rows = 3584u * 896u;
  // Bands of 384: rank 0 ends inside block 1, which rank 1 reads as well; rank 1 ends where block 2 does.
  CHECK(plan.band_bytes(t, 0) == rows * 2 * 50);
  CHECK(plan.premium_bytes(t, 0) == rows * 1 * 50);
  CHECK(plan.band_bytes(t, 1) == rows * 2 * 50);
  CHECK(plan.stored_bytes(t) == rows * 12 * 50);
  std::uint64_t read = 0;
  for (int r = 0; r < 8; ++r) read += plan.band_bytes(t, r);
  CHECK(read == rows * 16 * 50);  // 12 blocks, 4 of them twice
  CHECK(plan.premium_bytes(*plan.find(Role::kExpertUp, 1), 0) == 0);
}

TEST_CASE("bytes read are the bytes stored plus one copy of every block cut through") {
  for (const char* quant : {"UD-IQ1_S", "experts=IQ2_XS,other=Q6_K", "F32"}) {
    Outline o("tiny", quant);
    for (int tp : {1, 2, 3, 7}) {
      const Plan plan = o.plan({tp, 1, ShardPolicy::kFull, 0});
      for (const PlannedTensor& t : plan.tensors()) {
        if (t.cut == Cut::kReplicate) continue;
        std::set<std::uint64_t> bytes;  // each byte of the tensor by offset
        std::uint64_t sum = 0;
        for (int r = 0; r < tp; ++r) {
          const ByteRuns runs = plan.byte_runs(t, r);
          CHECK(runs.total() == plan.band_bytes(t, r));
          sum += runs.total();
          if (plan.stored_bytes(t) > 50'000) continue;
          for (std::uint64_t m = 0; m < runs.n_matrix; ++m) {
            for (std::uint64_t i = 0; i < runs.n_run; ++i) {
              const std::uint64_t at = runs.begin + m * runs.matrix_stride + i * runs.stride;
              for (std::uint64_t b = 0; b < runs.bytes; ++b) bytes.insert(at + b);
            }
          }
        }
        CHECK_MESSAGE(sum >= plan.stored_bytes(t), t.name);
        if (plan.stored_bytes(t) > 50'000) continue;
        CHECK_MESSAGE(bytes.size() == plan.stored_bytes(t), t.name);
        CHECK_MESSAGE(*bytes.rbegin() + 1 == plan.stored_bytes(t), t.name);
      }
    }
  }
}

TEST_CASE("collectives of a step follow from the plan") {
  Outline o("k3");
  const auto count = [](const Plan& plan, int rank, Point p) {
    return plan.collectives(rank)[static_cast<std::size_t>(p)];
  };
  const Plan full = o.plan({8, 1, ShardPolicy::kFull, 0});
  CHECK(count(full, 3, Point::kEmbed) == 1);
  CHECK(count(full, 3, Point::kAttnOut) == 93);
  CHECK(count(full, 3, Point::kRouterLatent) == 92);
  CHECK(count(full, 3, Point::kMoeLatent) == 92);
  CHECK(count(full, 3, Point::kFfnOut) == 93);
  CHECK(count(full, 3, Point::kStageHandOff) == 0);
  CHECK(count(full, 3, Point::kMlaQuery) + count(full, 3, Point::kMlaParts) == 0);
  const Plan cut = o.plan({8, 1, ShardPolicy::kFull, 0, true});
  CHECK(count(cut, 3, Point::kMlaQuery) == 24);
  CHECK(count(cut, 3, Point::kMlaParts) == 24);
  CHECK(count(cut, 3, Point::kAttnOut) == 93);
  CHECK_THROWS_AS(o.plan({8, 1, ShardPolicy::kExpertsOnly, 0, true}), std::invalid_argument);
  const Plan experts = o.plan({8, 1, ShardPolicy::kExpertsOnly, 0});
  CHECK(count(experts, 0, Point::kMoeLatent) == 92);
  CHECK(count(experts, 0, Point::kEmbed) + count(experts, 0, Point::kAttnOut) == 0);
  const Plan grid = o.plan({2, 3, ShardPolicy::kFull, 0});
  CHECK(count(grid, 0, Point::kEmbed) == 1);
  CHECK(count(grid, 2, Point::kEmbed) == 0);
  CHECK(count(grid, 0, Point::kStageHandOff) == 1);
  CHECK(count(grid, 3, Point::kStageHandOff) == 2);
  CHECK(count(grid, 5, Point::kStageHandOff) == 1);
  CHECK(count(grid, 0, Point::kMoeLatent) == 30);
  const Plan line = o.plan({1, 3, ShardPolicy::kFull, 0});
  CHECK(count(line, 1, Point::kAttnOut) == 0);
}

TEST_CASE("every fixture's configuration is its sidecar's, and it plans and tiles") {
  int n_model = 0;
  for (const auto& entry : std::filesystem::directory_iterator(K3_TEST_DATA "/models")) {
    if (entry.path().extension() != ".json") continue;
    std::ifstream in(entry.path());
    const auto sidecar = nlohmann::json::parse(in);
    const std::string path =
        (entry.path().parent_path() / sidecar["files"][0]["name"].get<std::string>()).string();
    CAPTURE(path);
    const ModelFile file = ModelFile::open(path);
    std::vector<std::string> dialects;
    const ModelConfig c = read_model_config(file.metadata(), file.tensors(), path, dialects);
    const auto& h = sidecar["hparams"];
    CHECK(c.n_layer == h["block_count"].get<std::int64_t>());
    CHECK(c.n_expert == h["expert_count"].get<std::int64_t>());
    CHECK(c.moe_latent == h["expert_latent_length"].get<std::int64_t>());
    CHECK(c.q_latent == h.value("attention.q_lora_rank", 0));
    CHECK(c.gate_lower_bound.has_value() == h.contains("kda.gate_lower_bound"));
    CHECK(c.expert_norm == h["expert_weights_norm"].get<bool>());
    CHECK(dialects.empty());
    for (const Layout& l : {Layout{1, 1, ShardPolicy::kFull, 0},
                            {3, 2, ShardPolicy::kFull, 0},
                            {8, 1, ShardPolicy::kExpertsOnly, 0},
                            {5, 1, ShardPolicy::kFull, 0}}) {
      const Plan plan = Plan::make(c, file.tensors(), l, path);
      CHECK(plan.tensors().size() == file.tensors().size());
      CHECK(plan.dialects().empty());
      CHECK_NOTHROW(plan.check_tiling());
    }
    ++n_model;
  }
  CHECK(n_model == 14);
}

// ---- dialects -------------------------------------------------------------------------------------------------------

TEST_CASE("ffn_latent_* names are the routed projections") {
  Outline o("tiny");
  o.rename_all("ffn_routed_down.weight", "ffn_latent_down.weight");
  o.rename_all("ffn_routed_up.weight", "ffn_latent_up.weight");
  o.rename_all("ffn_routed_norm.weight", "ffn_latent_norm.weight");
  const Plan plan = o.plan();
  CHECK(plan.find(Role::kRoutedDown, 1)->name == "blk.1.ffn_latent_down.weight");
  CHECK(plan.find(Role::kRoutedNorm, 1)->name == "blk.1.ffn_latent_norm.weight");
  CHECK(plan.dialects().size() == 3);
  CHECK(has(plan.dialects(), "ffn_latent_down (4 times)"));
}

TEST_CASE("residual scores kept as norm and projection become products of the two") {
  Outline o("tiny");
  for (const char* part : {"attn_res", "ffn_res", "output_res"}) {
    const std::string name = part;
    std::vector<TensorInfo> projections;
    for (TensorInfo& t : o.tensors) {
      if (!t.name.ends_with(name + "_score.weight")) continue;
      TensorInfo p = t;
      const std::string stem = t.name.substr(0, t.name.size() - std::string("score.weight").size());
      t.name = stem + "norm.weight";
      p.name = stem + "proj.weight";
      p.dims[1] = 1;
      p.n_dims = 2;
      projections.push_back(p);
    }
    o.tensors.insert(o.tensors.end(), projections.begin(), projections.end());
  }
  const Plan plan = o.plan({2, 1, ShardPolicy::kFull, 0});
  CHECK(plan.dialects().size() == 3);
  const PlannedTensor& t = *plan.find(Role::kFfnResScore, 2);
  CHECK(t.transform == Transform::kProduct);
  CHECK(t.name == "blk.2.ffn_res_norm.weight");
  CHECK(t.name2 == "blk.2.ffn_res_proj.weight");
  CHECK(plan.band_bytes(t, 0) == 2 * 256 * 4);
  CHECK(plan.find(Role::kOutputResScore)->transform == Transform::kProduct);
  // Half a pair is no score.
  o.remove_tensor("blk.2.ffn_res_proj.weight");
  const std::string line = refused(o);
  CHECK(has(line, "1 tensors are missing: blk.2.ffn_res_score.weight"));
  CHECK(has(line, "1 tensors have no use here: blk.2.ffn_res_norm.weight"));
}

TEST_CASE("attn_gate in a KDA layer is the KDA gate, in an MLA layer the MLA gate") {
  Outline o("tiny");
  o.rename_all("ssm_g.weight", "attn_gate.weight");
  const Plan plan = o.plan();
  CHECK(plan.find(Role::kKdaG, 0)->name == "blk.0.attn_gate.weight");
  CHECK(plan.find(Role::kMlaGate, 0) == nullptr);
  CHECK(plan.find(Role::kMlaGate, 3)->name == "blk.3.attn_gate.weight");
  CHECK(has(plan.dialects(), "attn_gate"));
}

TEST_CASE("ssm_a of 128 numbers for fewer heads: the first ones count") {
  Outline o("tiny");
  for (TensorInfo& t : o.tensors) {
    if (t.name.ends_with("ssm_a")) t.dims[0] = 128;
  }
  const Plan plan = o.plan({3, 1, ShardPolicy::kFull, 0});
  const PlannedTensor& t = *plan.find(Role::kKdaA, 0);
  CHECK(t.dims[0] == 128);
  CHECK(t.n_col == 8);
  CHECK(plan.box(t, 2).axis[0] == Band{5, 8});
  CHECK(has(plan.dialects(), "ssm_a longer than the 8 heads"));
  plan.check_tiling();
  o.tensor("blk.0.ssm_a").dims[0] = 7;
  CHECK(has(refused(o), "blk.0.ssm_a: shape [7], expected [8] (attention.head_count)"));
}

TEST_CASE("ssm_a is always taken as minus its absolute value") {
  Outline o("tiny");
  CHECK(o.plan().find(Role::kKdaA, 0)->transform == Transform::kNegAbs);
}

TEST_CASE("convolution weights of four, three and two dimensions are the same bytes") {
  for (const std::vector<std::int64_t>& dims :
       {std::vector<std::int64_t>{4, 1, 256, 1}, {4, 1, 256}, {4, 256}}) {
    Outline o("tiny");
    TensorInfo& t = o.tensor("blk.0.ssm_conv1d_k.weight");
    t.dims = {1, 1, 1, 1};
    std::copy(dims.begin(), dims.end(), t.dims.begin());
    t.n_dims = static_cast<int>(dims.size());
    const Plan plan = o.plan();
    CHECK(plan.find(Role::kKdaConvK, 0)->dims == std::array<std::int64_t, 3>{4, 256, 1});
    CHECK(plan.dialects().empty() == (dims.size() > 2));
  }
  Outline o("tiny");
  o.tensor("blk.0.ssm_conv1d_k.weight").dims = {256, 1, 4, 1};
  CHECK(has(refused(o), "blk.0.ssm_conv1d_k.weight: shape [256, 1, 4, 1], expected [4, 256]"));
}

// ---- refusals -------------------------------------------------------------------------------------------------------

TEST_CASE("fused tensors are refused by name with the reason") {
  Outline qkv("tiny");
  for (const char* part : {"q", "k", "v"}) {
    qkv.remove_tensor("blk.0.attn_" + std::string(part) + ".weight");
  }
  qkv.add("blk.0.attn_qkv.weight", {256, 768});
  CHECK(
      has(refused(qkv), "blk.0.attn_qkv.weight: fused tensors are not supported, expected attn_q"));
  Outline kv("tiny");
  kv.remove_tensor("blk.3.attn_k_b.weight");
  kv.remove_tensor("blk.3.attn_v_b.weight");
  kv.add("blk.3.attn_kv_b.weight", {64, 512});
  CHECK(has(refused(kv), "blk.3.attn_kv_b.weight: fused tensors are not supported"));
}

TEST_CASE("missing tensors are listed to a handful, with the naming seen") {
  Outline o("tiny");
  std::erase_if(o.tensors, [](const TensorInfo& t) { return has(t.name, "res_score"); });
  const std::string line = refused(o);
  CAPTURE(line);
  CHECK(has(line, "11 tensors are missing: output_res_score.weight, blk.0.attn_res_score.weight"));
  CHECK(has(line, "and 6 more"));
  CHECK(has(line, "naming: standard"));
}

TEST_CASE("a tensor without a use is refused by name, never left out") {
  Outline o("tiny");
  o.add("blk.1.attn_q.bias", {256});
  o.add("blk.77.attn_norm.weight", {256});
  const std::string line = refused(o);
  CHECK(has(line, "2 tensors have no use here: blk.1.attn_q.bias, blk.77.attn_norm.weight"));
}

TEST_CASE("a part of the attention that the model's keys rule out is refused, not skipped") {
  Outline o("tiny");
  o.set_key("kimi-k3.attention.head_count_kv", std::vector<std::int32_t>{0, 0, 0, 0, 1});
  CHECK(has(refused(o), "blk.3."));
}

TEST_CASE("a tensor named twice is refused") {
  Outline o("tiny");
  o.tensors.push_back(o.tensor("output_norm.weight"));
  CHECK(has(refused(o), "output_norm.weight: two tensors of this name"));
}

TEST_CASE("each tensor of a wrong shape is refused with found and expected") {
  Outline good("tiny");
  for (std::size_t i = 0; i < good.tensors.size(); ++i) {
    for (std::size_t axis = 0; axis < 2; ++axis) {
      Outline o("tiny");
      o.tensors[i].dims[axis] = o.tensors[i].dims[axis] + 256;
      o.tensors[i].n_dims = std::max(o.tensors[i].n_dims, static_cast<int>(axis) + 1);
      const std::string name = o.tensors[i].name;
      if (axis == 0 && name.ends_with("ssm_a")) continue;  // padding is a dialect
      const std::string line = refused(o);
      CAPTURE(name);
      CAPTURE(line);
      CHECK(!line.empty());
      // Widths of a feed-forward part follow from one of its tensors, so another of them may be named.
      if (!has(name, "ffn_")) CHECK((has(line, name) || has(line, "kimi-k3.")));
    }
  }
  Outline o("tiny");
  o.tensor("blk.0.attn_q.weight").dims[1] = 250;
  CHECK(refused(o) ==
        "m.gguf: blk.0.attn_q.weight: shape [256, 250], expected [256, 256] (embedding_length, "
        "attention.head_count * kda.head_dim)");
}

TEST_CASE("a row that is no whole number of blocks is refused") {
  Outline o(odd_shape(), "F32");
  o.tensor("blk.1.ffn_gate_exps.weight").type = BlockType::kIQ1_S;
  CHECK(has(refused(o),
            "blk.1.ffn_gate_exps.weight: a row of 22 elements, expected a multiple of "
            "256 for IQ1_S"));
}

TEST_CASE("an impossible layout is refused with the valid values") {
  Outline o("tiny");
  CHECK(refused(o, {1, 6, ShardPolicy::kFull, 0}) ==
        "--pp 6: valid: 1 to 5, as many stages as the model has layers");
  CHECK(has(refused(o, {0, 1, ShardPolicy::kFull, 0}), "--tp 0: valid: 1 to"));
  CHECK(refused(o, {6, 1, ShardPolicy::kFull, 4}) ==
        "--expert-groups 4: must divide --tp 6; valid: 1, 2, 3, 6");
  CHECK(has(refused(o, {6, 1, ShardPolicy::kExpertsOnly, 2}), "valid: 0 or 6"));
}

// ---- report ---------------------------------------------------------------------------------------------------------

TEST_CASE("the JSON of a plan adds up to the plan") {
  Outline o("tiny");
  const Plan plan = o.plan({3, 2, ShardPolicy::kFull, 0});
  const auto j = nlohmann::json::parse(plan_json(plan, {"tiny", "UD-IQ1_S"}, 4));
  CHECK(j["ranks"].size() == 6);
  CHECK(j["tensors"] == plan.tensors().size());
  std::uint64_t sum = 0, of_rank = 0;
  for (const PlannedTensor& t : plan.tensors()) sum += plan.band_bytes(t, 4);
  for (const auto& t : j["tensors_of_rank"]["tensors"])
    of_rank += t["read_bytes"].get<std::uint64_t>();
  CHECK(j["ranks"][4]["total_bytes"] == sum);
  CHECK(of_rank == sum);
  CHECK(j["ranks"][4]["collectives"]["StageHandOff"] == 1);
  const std::string table = plan_table(plan, {"tiny", "UD-IQ1_S"}, 4);
  CHECK(has(table, "blk.4.attn_output.weight"));
  CHECK_FALSE(has(table, "blk.0.attn_output.weight"));
}

}  // namespace
