#include "rank/config.h"

#include <doctest/doctest.h>

#include <limits>

#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::has;
using test::Outline;
using test::refusal;

std::string refused(Outline& o) {
  return refusal([&] { o.config(); });
}

TEST_CASE("the real model's keys are read") {
  Outline o("k3");
  const ModelConfig c = o.config();
  CHECK(c.n_layer == 93);
  CHECK(c.hidden == 7168);
  CHECK(c.n_vocab == 163840);
  CHECK(c.n_ctx == 1048576);
  CHECK(c.n_head == 96);
  CHECK(c.kda_width() == 12288);
  CHECK(c.cache_row() == 576);
  CHECK(c.nope() == 128);
  CHECK(c.value_len == 128);
  CHECK(c.q_latent == 1536);
  CHECK(c.moe_latent == 3584);
  CHECK(c.bank_block == 12);
  CHECK(c.gate_lower_bound == -5.0f);
  CHECK(c.situ.lambda == 25.0f);
  int n_mla = 0;
  for (const LayerConfig& l : c.layers) n_mla += l.is_mla;
  CHECK(n_mla == 24);
  CHECK(c.layers[91].is_mla);
  CHECK(c.layers[92].is_mla);
  CHECK(c.layers[0].is_dense);
  CHECK(c.layers[0].ffn_dense == 33792);
  CHECK(c.layers[1].ffn_expert == 3072);
  CHECK(c.layers[1].ffn_shared == 6144);
  CHECK(o.dialects.empty());
}

TEST_CASE("a required key that is missing is named, and nothing is put in its place") {
  for (const char* key : {"block_count",
                          "context_length",
                          "embedding_length",
                          "attention.head_count",
                          "attention.head_count_kv",
                          "attention.layer_norm_rms_epsilon",
                          "kda.head_dim",
                          "ssm.conv_kernel",
                          "attention.kv_lora_rank",
                          "rope.dimension_count",
                          "attention.key_length_mla",
                          "expert_count",
                          "expert_used_count",
                          "expert_feed_forward_length",
                          "expert_latent_length",
                          "leading_dense_block_count",
                          "expert_weights_norm",
                          "expert_weights_scale",
                          "expert_gating_func",
                          "attn_res.block_size",
                          "activation.situ_beta",
                          "activation.situ_linear_beta"}) {
    Outline o("tiny");
    const std::string name = "kimi-k3." + std::string(key);
    o.remove_key(name);
    const std::string line = refused(o);
    CAPTURE(line);
    CHECK(has(line, "m.gguf: " + name + ": required key is missing"));
  }
}

TEST_CASE("keys that the description lets be absent may be absent") {
  Outline o("tiny");
  for (const char* key : {"kda.gate_lower_bound", "attention.key_length", "expert_shared_count",
                          "feed_forward_length"}) {
    o.remove_key("kimi-k3." + std::string(key));
  }
  CHECK_FALSE(o.config().gate_lower_bound.has_value());
}

TEST_CASE("another architecture is refused by name") {
  Outline o("tiny");
  o.set_key("general.architecture", "llama");
  CHECK(refused(o) == "m.gguf: general.architecture: found llama, expected kimi-k3");
  o.remove_key("general.architecture");
  CHECK(has(refused(o), "general.architecture: key is missing"));
}

TEST_CASE("a gating function other than sigmoid is refused") {
  Outline o("tiny");
  o.set_key("kimi-k3.expert_gating_func", std::uint32_t{1});
  CHECK(has(refused(o), "kimi-k3.expert_gating_func: found 1, expected 2 (sigmoid)"));
}

TEST_CASE("each flat key spelling is read as the dotted one and told once") {
  const std::pair<const char*, const char*> spellings[] = {
      {"attn_res.block_size", "attn_res_block_size"},
      {"activation.situ_beta", "situ_beta"},
      {"activation.situ_linear_beta", "situ_linear_beta"},
      {"expert_latent_length", "moe_latent_size"}};
  for (const auto& [key, flat] : spellings) {
    Outline o("tiny");
    const ModelConfig want = o.config();
    o.rename_key("kimi-k3." + std::string(key), "kimi-k3." + std::string(flat));
    const ModelConfig c = o.config();
    CHECK(c.bank_block == want.bank_block);
    CHECK(c.situ.beta == want.situ.beta);
    CHECK(c.situ.lambda == want.situ.lambda);
    CHECK(c.moe_latent == want.moe_latent);
    REQUIRE(o.dialects.size() == 1);
    CHECK(has(o.dialects[0], flat));
  }
}

TEST_CASE("two spellings of a key that say different things are refused") {
  Outline o("tiny");
  o.set_key("kimi-k3.situ_beta", 5.0f);
  const std::string line = refused(o);
  CHECK(has(line, "kimi-k3.activation.situ_beta"));
  CHECK(has(line, "kimi-k3.situ_beta"));
}

TEST_CASE("head_count_kv as a single number applies to all layers") {
  ModelShape s = named_shape("tiny");
  s.mla_every = 1;
  Outline all(s, "F32");
  all.set_key("kimi-k3.attention.head_count_kv", std::uint32_t{1});
  for (const LayerConfig& l : all.config().layers) CHECK(l.is_mla);
  Outline short_list("tiny");
  short_list.set_key("kimi-k3.attention.head_count_kv", std::vector<std::int32_t>{0, 0, 1});
  CHECK(has(refused(short_list), "block_count = 5"));
}

TEST_CASE("expert_feed_forward_length may be one number for each layer") {
  Outline o("tiny");
  o.set_key("kimi-k3.expert_feed_forward_length",
            std::vector<std::uint32_t>{0, 256, 256, 256, 256});
  CHECK(o.config().layers[2].ffn_expert == 256);
  CHECK(o.dialects.empty());
}

TEST_CASE("a width-pruned file is taken at its tensors' widths and keeps its shared width") {
  ModelShape s = named_shape("tiny");
  s.ffn_expert = 128;
  Outline o(s, "F32");
  for (TensorInfo& t : o.tensors) {
    if (t.name.ends_with("_gate_shexp.weight") || t.name.ends_with("_up_shexp.weight")) {
      t.dims[1] = 512;
    }
    if (t.name.ends_with("_down_shexp.weight")) t.dims[0] = 512;
  }
  o.set_key("kimi-k3.expert_feed_forward_length", std::uint32_t{256});
  const ModelConfig c = o.config();
  CHECK(c.layers[1].ffn_expert == 128);
  CHECK(c.layers[1].ffn_shared == 512);
  CHECK(has(o.dialects, "expert_feed_forward_length 256, but ffn_gate_exps is 128 wide"));
  CHECK_NOTHROW(o.plan());
}

TEST_CASE("a key that cannot be right beside its tensor is refused with both numbers") {
  const std::pair<const char*, const char*> cases[] = {
      {"expert_count", "blk.1.ffn_gate_exps.weight is [256, 256, 12]"},
      {"expert_latent_length", "blk.1.ffn_gate_exps.weight is [256, 256, 12]"},
      {"attention.q_lora_rank", "blk.3.attn_q_a.weight is [256, 64]"},
      {"attention.value_length_mla", "blk.3.attn_v_b.weight is [64, 32, 8]"},
      {"attention.head_count", "blk.0.ssm_beta.weight is [256, 8]"}};
  for (const auto& [key, what] : cases) {
    Outline o("tiny");
    o.set_key("kimi-k3." + std::string(key), std::uint32_t{17});
    const std::string line = refused(o);
    CAPTURE(line);
    CHECK(has(line, "kimi-k3." + std::string(key) + ": found 17, but " + what));
  }
  Outline row("tiny");
  row.set_key("kimi-k3.attention.key_length", std::uint32_t{81});
  CHECK(has(refused(row), "kimi-k3.attention.key_length: found 81, expected 80"));
  Outline q("tiny");
  q.remove_key("kimi-k3.attention.q_lora_rank");
  CHECK(
      has(refused(q), "attention.q_lora_rank: key is missing, but blk.3.attn_q_a.weight is there"));
}

TEST_CASE("a value length that no key states is taken from attn_v_b") {
  Outline o("tiny");
  o.remove_key("kimi-k3.attention.value_length_mla");
  CHECK(o.config().value_len == 32);
}

TEST_CASE("key, token list and embedding must agree on the vocabulary") {
  Outline o("tiny");
  o.set_key("tokenizer.ggml.tokens", std::vector<std::string>(510, "x"));
  const std::string line = refused(o);
  CAPTURE(line);
  CHECK(has(line, "vocab_size 512, tokenizer.ggml.tokens has 510, token_embd.weight has 512 rows"));
  Outline key("tiny");
  key.set_key("kimi-k3.vocab_size", std::uint32_t{511});
  CHECK(has(refused(key), "vocab_size 511, token_embd.weight has 512 rows"));
  Outline none("tiny");
  none.remove_key("kimi-k3.vocab_size");
  CHECK(has(refused(none), "kimi-k3.vocab_size: required key is missing"));
}

TEST_CASE("an optional part that only some layers have is refused") {
  for (const char* name : {"blk.2.ffn_routed_norm.weight", "blk.2.ffn_gate_shexp.weight"}) {
    Outline o("tiny");
    o.remove_tensor(name);
    if (has(name, "shexp")) {
      o.remove_tensor("blk.2.ffn_up_shexp.weight");
      o.remove_tensor("blk.2.ffn_down_shexp.weight");
    }
    const std::string line = refused(o);
    CAPTURE(line);
    CHECK(has(line, std::string(name) + ": tensor is missing, but"));
  }
  Outline gate("tiny");
  gate.remove_tensor("blk.3.attn_gate.weight");
  CHECK(has(refused(gate), "blk.3.attn_gate.weight: tensor is missing, but blk.4"));
}

TEST_CASE("optional parts that are absent everywhere are absent in the configuration") {
  Outline o("tiny");
  std::erase_if(o.tensors, [](const TensorInfo& t) {
    return t.name.ends_with("ffn_routed_norm.weight") || has(t.name, "shexp") ||
           t.name.ends_with("attn_gate.weight");
  });
  CHECK(
      has(refused(o), "expert_shared_count: found 2, but blk.1.ffn_gate_shexp.weight is missing"));
  o.set_key("kimi-k3.expert_shared_count", std::uint32_t{0});
  const ModelConfig c = o.config();
  CHECK_FALSE(c.layers[1].has_routed_norm);
  CHECK_FALSE(c.layers[3].has_attn_gate);
  CHECK(c.layers[1].ffn_shared == 0);
  CHECK_NOTHROW(o.plan());
}

TEST_CASE("numbers out of range are refused with the range") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::pair<const char*, Value> cases[] = {{"block_count", std::uint32_t{0}},
                                                 {"block_count", std::uint32_t{4'000'000'000}},
                                                 {"embedding_length", std::uint64_t{1} << 62},
                                                 {"attention.head_count", std::int32_t{-4}},
                                                 {"expert_used_count", std::uint32_t{13}},
                                                 {"leading_dense_block_count", std::uint32_t{6}},
                                                 {"attn_res.block_size", std::uint32_t{0}},
                                                 {"attention.key_length_mla", std::uint32_t{16}},
                                                 {"attention.layer_norm_rms_epsilon", 0.0f},
                                                 {"attention.layer_norm_rms_epsilon", nan},
                                                 {"kda.gate_lower_bound", 5.0f},
                                                 {"activation.situ_beta", 0.0f},
                                                 {"expert_weights_scale", nan},
                                                 {"attention.head_count_kv", std::int32_t{-1}},
                                                 {"block_count", "five"},
                                                 {"expert_weights_norm", std::uint32_t{1}}};
  for (const auto& [key, value] : cases) {
    Outline o("tiny");
    o.set_key("kimi-k3." + std::string(key), value);
    const std::string line = refused(o);
    CAPTURE(line);
    CHECK(has(line, "kimi-k3." + std::string(key)));
  }
}

}  // namespace
