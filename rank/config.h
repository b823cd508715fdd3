// ModelConfig: what the file says. Layout and RunConfig: what the user asked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace k3 {

class Metadata;  // loader/gguf.h
struct TensorInfo;

// One layer. Widths come from the tensors, never from the keys (a width-pruned file keeps its full shared width).
struct LayerConfig {
  bool is_mla = false;
  bool is_dense = false;
  bool has_attn_gate = false;    // MLA only
  bool has_routed_norm = false;  // MoE only
  std::int64_t ffn_dense = 0;    // width of the dense ffn, 0 in a MoE layer
  std::int64_t ffn_expert = 0;   // width of one expert, 0 in a dense layer
  std::int64_t ffn_shared = 0;   // fused width of the shared experts, 0 where absent
};

// Symbols as in the model's description; no defaults but those it lists.
struct ModelConfig {
  std::string name;  // general.name, may be empty
  std::int64_t n_layer = 0;
  std::int64_t hidden = 0;
  std::int64_t n_vocab = 0;
  std::int64_t n_ctx = 0;   // the model's limit
  std::int64_t n_head = 0;  // KDA and MLA alike
  float rms_eps = 0;
  // KDA
  std::int64_t kda_head_dim = 0;
  std::int64_t conv_kernel = 0;
  std::optional<float> gate_lower_bound;  // absent: the softplus form of the gate
  // MLA
  std::int64_t q_latent = 0;  // 0: one attn_q, no low-rank pair
  std::int64_t kv_latent = 0;
  std::int64_t rope = 0;       // width of the un-rotated tail
  std::int64_t key_len = 0;    // per head: nope + rope
  std::int64_t value_len = 0;  // per head
  // MoE
  std::int64_t n_expert = 0;
  std::int64_t n_expert_used = 0;
  std::int64_t moe_latent = 0;
  std::int64_t n_dense = 0;  // leading dense layers
  bool expert_norm = false;
  float expert_scale = 0;
  // residual attention
  std::int64_t bank_block = 0;
  Situ situ;
  std::vector<LayerConfig> layers;

  std::int64_t nope() const { return key_len - rope; }
  std::int64_t kda_width() const { return n_head * kda_head_dim; }
  std::int64_t cache_row() const { return kv_latent + rope; }
  // Streams banked before layer il runs, as its attention mixes them: ceil(il / bank_block). n_layer: as the head does.
  std::int64_t bank_before(std::int64_t il) const { return (il + bank_block - 1) / bank_block; }
  // Streams the bank holds when layer il mixes for its ffn (layer il's own push included): il / bank_block + 1.
  std::int64_t bank_size(std::int64_t il) const { return il / bank_block + 1; }
};

enum class ShardPolicy : std::uint8_t {
  kExpertsOnly,  // experts and output head cut, everything else on every rank: one sum per MoE layer
  kFull,         // everything cut
};

// How the world's ranks share the model: rank = stage * tp + tp_rank.
struct Layout {
  int tp = 1;
  int pp = 1;
  ShardPolicy policy = ShardPolicy::kFull;
  int expert_groups =
      0;  // experts are cut into this many groups, each expert's ffn into tp / groups bands; 0: chosen by plan
  bool kv_shard = false;  // each rank of a stage keeps a share of the latent cache's rows
  int world() const { return tp * pp; }
  bool cuts_rows() const { return kv_shard && tp > 1; }
  int stage(int rank) const { return rank / tp; }
  int tp_rank(int rank) const { return rank % tp; }
};

// Reads and checks the keys and the tensors' widths. Keys missing, of the wrong type or out of range throw
// std::invalid_argument naming file and key. Legacy spellings of keys are accepted; each adds a line to `dialects`.
ModelConfig read_model_config(const Metadata& meta, const std::vector<TensorInfo>& tensors,
                              const std::string& file, std::vector<std::string>& dialects);

}  // namespace k3
