// Models without weights: named shapes and quantization recipes give the metadata and the tensor list that a file of
// that kind would have, for planning and for synthetic files. Sizes of the real model: its published configuration.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loader/gguf.h"
#include "loader/gguf_writer.h"
#include "rank/config.h"
#include "rank/plan.h"

namespace k3 {

// Sizes that may be chosen freely; the layers follow from them.
struct ModelShape {
  std::string name;
  std::int64_t n_layer = 0;
  std::int64_t n_dense = 0;  // leading dense layers
  std::int64_t mla_every =
      4;  // layers il with il % mla_every == mla_every - 1 are MLA, and the last one
  std::int64_t hidden = 0;
  std::int64_t n_vocab = 0;
  std::int64_t n_ctx = 0;
  std::int64_t n_head = 0;
  std::int64_t kda_head_dim = 0;
  std::int64_t conv_kernel = 4;
  std::int64_t q_latent = 0;  // 0: one attn_q
  std::int64_t kv_latent = 0;
  std::int64_t rope = 0;
  std::int64_t key_len = 0;    // per head: nope + rope
  std::int64_t value_len = 0;  // per head
  std::int64_t n_expert = 0;
  std::int64_t n_expert_used = 0;
  std::int64_t n_shared = 0;  // shared experts; 0: none
  std::int64_t moe_latent = 0;
  std::int64_t ffn_expert = 0;
  std::int64_t ffn_shared = 0;  // of all shared experts together; 0: n_shared * ffn_expert
  std::int64_t ffn_dense = 0;
  std::int64_t bank_block = 0;
};

// The sizes by their names, as k3synth's options spell them.
struct ShapeSize {
  const char* name;  // "layers"
  std::int64_t ModelShape::*size;
  const char* help;
};
std::span<const ShapeSize> shape_sizes();

// "k3" (the real model; "k3-full" is another name of it), "k3-neuron" (the published file whose routed experts are pruned to
// half their width), "k3-8l" and "k3-16l" (true widths, fewer layers), "k3-nano" and "tiny". Throws std::invalid_argument naming the valid ones.
ModelShape named_shape(std::string_view name);
std::vector<std::string> shape_names();

// Throws std::invalid_argument naming the size that makes no model (0 heads, more experts used than there are, ...).
ModelConfig config_of(const ModelShape& shape);

// Which block type a tensor of a quantized file has. Vectors, convolutions, scores, the router and ssm_beta are F32 in all.
class QuantRecipe {
 public:
  // A published recipe ("UD-IQ1_S", "UD-Q2_K_XL", "UD-Q4_K_XL", "UD-Q8_K_XL", "Neuron-IQ1_S"), a block type for all matrices
  // ("Q8_0"), or "experts=T,other=T" with ",vocab=T" (embedding and head) where that differs from the others. Throws std::invalid_argument naming the valid ones.
  static QuantRecipe parse(std::string_view name);

  // The recipe's type where `n_in`, the length of a row, is a multiple of its block; else Q8_0, else F32, as
  // quantizers do.
  BlockType type_of(Role role, std::int64_t n_in) const;
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  BlockType experts_ = BlockType::kF32;
  BlockType other_ = BlockType::kF32;
  BlockType vocab_ = BlockType::kF32;
};
std::vector<std::string> recipe_names();

struct ModelOutline {
  MetadataEntries metadata;         // without the tokenizer's keys
  std::vector<TensorDecl> tensors;  // in the order of the forward pass
  std::vector<Role> roles;          // of each tensor
};
ModelOutline outline_of(const ModelShape& shape, const QuantRecipe& recipe);

// The outline as a file's header would show it, for read_model_config and Plan::make. Offsets are 0.
Metadata metadata_of(const ModelOutline& outline);
std::vector<TensorInfo> tensors_of(const ModelOutline& outline);

}  // namespace k3
