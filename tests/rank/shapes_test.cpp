#include "rank/shapes.h"

#include <doctest/doctest.h>

#include <map>

#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::has;
using test::refusal;

std::uint64_t bytes_of(const ModelOutline& o) {
  std::uint64_t sum = 0;
  for (const TensorDecl& t : o.tensors) sum += t.bytes();
  return sum;
}

TEST_CASE("the real shape in UD-IQ1_S has 2573 tensors and the published 553.2 GiB") {
  const ModelOutline o = outline_of(named_shape("k3"), QuantRecipe::parse("UD-IQ1_S"));
  CHECK(o.tensors.size() == 2573);
  CHECK(bytes_of(o) == 593'990'834'560u);  // 553.20 GiB
  std::uint64_t n_weight = 0;
  for (const TensorInfo& t : tensors_of(o)) n_weight += static_cast<std::uint64_t>(t.n_elem());
  CHECK(n_weight / 10'000'000 == 277'948);  // 2779.48 billion
}

TEST_CASE(
    "the other published files come out within a tenth of a percent where their types are known") {
  const std::pair<const char*, double> files[] = {{"UD-Q4_K_XL", 1508.7e9},
                                                  {"UD-Q8_K_XL", 1561.2e9}};
  for (const auto& [name, bytes] : files) {
    const double got =
        static_cast<double>(bytes_of(outline_of(named_shape("k3"), QuantRecipe::parse(name))));
    CAPTURE(got);
    CHECK(got == doctest::Approx(bytes).epsilon(1e-3));
  }
}

TEST_CASE("UD-IQ1_S puts each class of tensor in the type the published file has") {
  const ModelOutline o = outline_of(named_shape("k3"), QuantRecipe::parse("UD-IQ1_S"));
  std::map<std::string, BlockType> type;
  for (const TensorDecl& t : o.tensors) type[t.name] = t.type;
  for (const char* f32 : {"output_norm.weight", "output_res_score.weight", "blk.0.ssm_beta.weight",
                          "blk.0.ssm_conv1d_q.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias",
                          "blk.1.ffn_gate_inp.weight", "blk.1.exp_probs_b.bias"}) {
    CHECK(type.at(f32) == BlockType::kF32);
  }
  for (const char* q8 : {"token_embd.weight", "output.weight", "blk.0.ssm_f_a.weight",
                         "blk.0.ssm_f_b.weight", "blk.0.ssm_g.weight", "blk.3.attn_k_b.weight",
                         "blk.3.attn_kv_a_mqa.weight", "blk.1.ffn_routed_up.weight"}) {
    CHECK(type.at(q8) == BlockType::kQ8_0);
  }
  CHECK(type.at("blk.92.ffn_down_exps.weight") == BlockType::kIQ1_S);
}

TEST_CASE("every named shape makes a plan in every recipe") {
  for (const std::string& shape : shape_names()) {
    for (const std::string& quant : recipe_names()) {
      test::Outline o(shape, quant);
      CHECK_NOTHROW(o.plan());
      CHECK(o.dialects.empty());
    }
  }
}

TEST_CASE("rows that are no whole number of blocks fall back to Q8_0, then to F32") {
  const QuantRecipe r = QuantRecipe::parse("experts=IQ1_S,other=Q6_K");
  CHECK(r.type_of(Role::kExpertGate, 512) == BlockType::kIQ1_S);
  CHECK(r.type_of(Role::kExpertGate, 96) == BlockType::kQ8_0);
  CHECK(r.type_of(Role::kKdaQ, 512) == BlockType::kQ6_K);
  CHECK(r.type_of(Role::kKdaQ, 80) == BlockType::kF32);
  CHECK(r.type_of(Role::kRouter, 512) == BlockType::kF32);
}

TEST_CASE(
    "a recipe may give embedding and head a type of their own; a shape the shared experts their "
    "width") {
  const QuantRecipe r = QuantRecipe::parse("experts=IQ1_S,other=Q8_0,vocab=F16");
  CHECK(r.type_of(Role::kTokenEmbd, 512) == BlockType::kF16);
  CHECK(r.type_of(Role::kOutput, 512) == BlockType::kF16);
  CHECK(r.type_of(Role::kKdaQ, 512) == BlockType::kQ8_0);
  CHECK(QuantRecipe::parse("experts=IQ1_S,other=Q6_K").type_of(Role::kOutput, 512) ==
        BlockType::kQ6_K);
  ModelShape s = named_shape("tiny");
  CHECK(config_of(s).layers[1].ffn_shared == 512);
  s.ffn_shared = 320;
  CHECK(config_of(s).layers[1].ffn_shared == 320);
  s.n_shared = 0;
  CHECK(has(refusal([&] { config_of(s); }), "a shared width, but no shared experts"));
}

TEST_CASE("an unknown shape or recipe is refused with the valid ones") {
  CHECK(has(refusal([] { named_shape("k4"); }), "valid: k3, k3-neuron, k3-8l"));
  for (const char* bad :
       {"UD-IQ9", "experts=IQ1_S", "experts=Q8_0,other=Q99",
        "experts=,other=", "experts=Q8_0,other=Q8_0,vocab=Q99",
        "experts=Q8_0,other=Q8_0,vocab=F16,more=F32", "experts=Q8_0,vocab=F16", ""}) {
    CHECK(has(refusal([&] { QuantRecipe::parse(bad); }), "UD-IQ1_S"));
  }
}

TEST_CASE("a shape that is no model is refused by what is wrong with it") {
  ModelShape s = named_shape("tiny");
  s.n_head = 0;
  CHECK(has(refusal([&] { config_of(s); }), "heads 0"));
  s = named_shape("tiny");
  s.n_expert_used = 13;
  CHECK(has(refusal([&] { config_of(s); }), "more experts used"));
  s = named_shape("tiny");
  s.key_len = 16;
  CHECK(has(refusal([&] { config_of(s); }), "key length 16"));
  s = named_shape("tiny");
  s.hidden = (std::int64_t{1} << 32) + 64;
  CHECK(has(refusal([&] { config_of(s); }), "hidden width 4294967360, expected at most"));
  s = named_shape("tiny");
  s.n_layer = 100'000'000;
  CHECK(has(refusal([&] { config_of(s); }), "layers 100000000, expected at most 4096"));
}

}  // namespace
