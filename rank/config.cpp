#include "rank/config.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string_view>

#include "loader/gguf.h"
#include "rank/tensor_table.h"

namespace k3 {
namespace {

// Bounds far above any model; with them no product of two or three sizes overflows later.
constexpr std::int64_t kMaxLayers = 4096;
constexpr std::int64_t kMaxWidth = 1 << 20;
constexpr std::int64_t kMaxHeads = 1 << 14;
constexpr std::int64_t kMaxExperts = 1 << 16;
constexpr std::int64_t kMaxVocab = 1 << 24;
constexpr std::int64_t kMaxContext = (std::int64_t{1} << 31) - 1;  // positions are 32-bit

constexpr std::string_view kPrefix = "kimi-k3.";

// Flat spellings met in published files.
struct LegacyKey {
  std::string_view key;
  std::string_view legacy;
};
constexpr LegacyKey kLegacyKeys[] = {
    {"attn_res.block_size", "attn_res_block_size"},
    {"activation.situ_beta", "situ_beta"},
    {"activation.situ_linear_beta", "situ_linear_beta"},
    {"expert_latent_length", "moe_latent_size"},
};

class KeyReader {
 public:
  KeyReader(const Metadata& meta, const std::string& file, std::vector<std::string>& dialects)
      : meta_(meta), file_(file), dialects_(dialects) {}

  [[noreturn]] void fail(std::string_view key, const std::string& what) const {
    throw std::invalid_argument(file_ + ": " + full(key) + ": " + what);
  }

  bool has(std::string_view key) { return meta_.find(spelling(key)) != nullptr; }

  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) {
    return ranged(key, require<std::int64_t>(key), low, high);
  }

  std::optional<std::int64_t> optional_integer(std::string_view key, std::int64_t low,
                                               std::int64_t high) {
    const auto v = meta_.get<std::int64_t>(spelling(key));
    return v ? std::optional(ranged(key, *v, low, high)) : std::nullopt;
  }

  // A key that holds one number for all layers or an array with one each. Empty when absent.
  std::vector<std::int64_t> per_layer(std::string_view key, std::int64_t n_layer,
                                      std::int64_t high) {
    const std::string name = spelling(key);
    const Value* v = meta_.find(name);
    if (!v) return {};
    std::vector<std::int64_t> out;
    if (v->is_array()) {
      if (v->size() != static_cast<std::size_t>(n_layer)) {
        fail(key, v->describe() + ", expected one number for each of block_count = " +
                      std::to_string(n_layer) + " layers");
      }
      out = *meta_.get_array<std::int64_t>(name);
    } else {
      out.assign(static_cast<std::size_t>(n_layer), *meta_.get<std::int64_t>(name));
    }
    for (const std::int64_t n : out) ranged(key, n, 0, high);
    return out;
  }

  float number(std::string_view key) { return finite(key, require<float>(key)); }

  std::optional<float> optional_number(std::string_view key) {
    const auto v = meta_.get<float>(spelling(key));
    return v ? std::optional(finite(key, *v)) : std::nullopt;
  }

  bool flag(std::string_view key) { return require<bool>(key); }

  static std::string full(std::string_view key) { return std::string(kPrefix) + std::string(key); }

 private:
  template <class T>
  T require(std::string_view key) {
    const auto v = meta_.get<T>(spelling(key));
    if (!v) fail(key, "required key is missing; it has no default");
    return *v;
  }

  std::int64_t ranged(std::string_view key, std::int64_t v, std::int64_t low, std::int64_t high) {
    if (v < low || v > high) {
      fail(key, "found " + std::to_string(v) + ", expected " + std::to_string(low) + " to " +
                    std::to_string(high));
    }
    return v;
  }

  float finite(std::string_view key, float v) {
    if (!std::isfinite(v)) fail(key, "found " + std::to_string(v) + ", expected a finite number");
    return v;
  }

  // The key as this file spells it. Both spellings are accepted when they say the same.
  std::string spelling(std::string_view key) {
    const std::string name = full(key);
    for (const LegacyKey& l : kLegacyKeys) {
      if (l.key != key) continue;
      const std::string legacy = full(l.legacy);
      const Value* old = meta_.find(legacy);
      if (!old) break;
      const Value* now = meta_.find(name);
      if (!now) {
        const std::string line = "key " + name + " spelled " + legacy;
        if (std::find(dialects_.begin(), dialects_.end(), line) == dialects_.end()) {
          dialects_.push_back(line);
        }
        return legacy;
      }
      if (*now != *old) {
        fail(key, now->describe() + " there, but " + old->describe() + " in " + legacy);
      }
    }
    return name;
  }

  const Metadata& meta_;
  const std::string& file_;
  std::vector<std::string>& dialects_;
};

void check_architecture(const Metadata& meta, const std::string& file) {
  const auto arch = meta.get<std::string>("general.architecture");
  if (!arch) {
    throw std::invalid_argument(file + ": general.architecture: key is missing, expected kimi-k3");
  }
  if (*arch != "kimi-k3") {
    throw std::invalid_argument(file + ": general.architecture: found " + printable(*arch) +
                                ", expected kimi-k3");
  }
}

void read_attention(KeyReader& keys, ModelConfig& c) {
  c.n_head = keys.integer("attention.head_count", 1, kMaxHeads);
  c.rms_eps = keys.number("attention.layer_norm_rms_epsilon");
  if (!(c.rms_eps > 0)) {
    keys.fail("attention.layer_norm_rms_epsilon",
              "found " + std::to_string(c.rms_eps) + ", expected a positive number");
  }
  c.kda_head_dim = keys.integer("kda.head_dim", 1, kMaxWidth);
  c.conv_kernel = keys.integer("ssm.conv_kernel", 1, 1024);
  c.gate_lower_bound = keys.optional_number("kda.gate_lower_bound");
  if (c.gate_lower_bound && !(*c.gate_lower_bound < 0)) {
    keys.fail("kda.gate_lower_bound",
              "found " + std::to_string(*c.gate_lower_bound) + ", expected a negative number");
  }
  // Absent (or 0, as some writers put it): MLA layers have one attn_q instead of a low-rank pair.
  c.q_latent = keys.optional_integer("attention.q_lora_rank", 0, kMaxWidth).value_or(0);
  c.kv_latent = keys.integer("attention.kv_lora_rank", 1, kMaxWidth);
  c.rope = keys.integer("rope.dimension_count", 1, kMaxWidth);
  c.key_len = keys.integer("attention.key_length_mla", 1, kMaxWidth);
  if (c.key_len <= c.rope) {
    keys.fail("attention.key_length_mla",
              "found " + std::to_string(c.key_len) +
                  ", expected more than rope.dimension_count = " + std::to_string(c.rope));
  }
  const auto row = keys.optional_integer("attention.key_length", 1, 2 * kMaxWidth);
  if (row && *row != c.cache_row()) {
    keys.fail("attention.key_length", "found " + std::to_string(*row) + ", expected " +
                                          std::to_string(c.cache_row()) +
                                          " = attention.kv_lora_rank + rope.dimension_count");
  }
}

void read_experts(KeyReader& keys, ModelConfig& c) {
  c.n_expert = keys.integer("expert_count", 1, kMaxExperts);
  c.n_expert_used = keys.integer("expert_used_count", 1, c.n_expert);
  c.moe_latent = keys.integer("expert_latent_length", 1, kMaxWidth);
  c.n_dense = keys.integer("leading_dense_block_count", 0, c.n_layer);
  c.expert_norm = keys.flag("expert_weights_norm");
  c.expert_scale = keys.number("expert_weights_scale");
  const std::int64_t gating = keys.integer("expert_gating_func", 0, 255);
  if (gating != 2) {
    keys.fail("expert_gating_func",
              "found " + std::to_string(gating) + ", expected 2 (sigmoid), the only one supported");
  }
}

// Length of an axis of the first of these tensors that is there; 0 when none is (the plan then names what is missing).
std::int64_t width_of(const TensorIndex& index, int layer,
                      std::initializer_list<std::pair<Role, std::size_t>> sources) {
  for (const auto& [role, axis] : sources) {
    if (const FoundTensor f = index.find(role, layer)) {
      return std::min(f.tensor->dims.at(axis), kMaxWidth + 1);
    }
  }
  return 0;
}

// An optional part is in all layers of its kind or in none: in some only, tensors were lost on the way.
class AllOrNone {
 public:
  explicit AllOrNone(Role role) : role_(role) {}
  void see(bool present, int layer) { (present ? with_ : without_) = layer; }
  void check(const std::string& file) const {
    if (with_ < 0 || without_ < 0) return;
    throw std::invalid_argument(file + ": " + tensor_name(role_, without_) +
                                ": tensor is missing, but " + tensor_name(role_, with_) +
                                " is there: an optional part is in all such layers or in none");
  }

 private:
  Role role_;
  int with_ = -1;
  int without_ = -1;
};

void read_layers(const std::vector<std::int64_t>& kv_heads, const TensorIndex& index,
                 const std::string& file, ModelConfig& c) {
  AllOrNone gate(Role::kMlaGate);
  AllOrNone norm(Role::kRoutedNorm);
  AllOrNone shared(Role::kSharedGate);
  c.layers.resize(static_cast<std::size_t>(c.n_layer));
  for (int il = 0; il < c.n_layer; ++il) {
    LayerConfig& l = c.layers[static_cast<std::size_t>(il)];
    l.is_mla = kv_heads[static_cast<std::size_t>(il)] != 0;
    l.is_dense = il < c.n_dense;
    if (l.is_mla) {
      l.has_attn_gate = static_cast<bool>(index.find(Role::kMlaGate, il));
      gate.see(l.has_attn_gate, il);
    }
    if (l.is_dense) {
      l.ffn_dense =
          width_of(index, il, {{Role::kDenseGate, 1}, {Role::kDenseUp, 1}, {Role::kDenseDown, 0}});
      continue;
    }
    l.has_routed_norm = static_cast<bool>(index.find(Role::kRoutedNorm, il));
    norm.see(l.has_routed_norm, il);
    l.ffn_expert =
        width_of(index, il, {{Role::kExpertGate, 1}, {Role::kExpertUp, 1}, {Role::kExpertDown, 0}});
    l.ffn_shared =
        width_of(index, il, {{Role::kSharedGate, 1}, {Role::kSharedUp, 1}, {Role::kSharedDown, 0}});
    shared.see(l.ffn_shared > 0, il);
  }
  for (std::size_t il = 0; il < c.layers.size(); ++il) {
    const LayerConfig& l = c.layers[il];
    if (std::max({l.ffn_dense, l.ffn_expert, l.ffn_shared}) > kMaxWidth) {
      throw std::invalid_argument(file + ": blk." + std::to_string(il) +
                                  ": a feed-forward width is over " + std::to_string(kMaxWidth));
    }
  }
  gate.check(file);
  norm.check(file);
  shared.check(file);
}

std::int64_t read_vocab(KeyReader& keys, const Metadata& meta, const TensorIndex& index) {
  const auto key = keys.optional_integer("vocab_size", 1, kMaxVocab);
  const std::vector<std::string>* tokens = meta.strings("tokenizer.ggml.tokens");
  const FoundTensor embd = index.find(Role::kTokenEmbd, -1);
  const std::int64_t n_token = tokens ? static_cast<std::int64_t>(tokens->size()) : 0;
  const std::int64_t n_row = embd ? embd.tensor->dims[1] : 0;
  const std::int64_t n = key ? *key : tokens ? n_token : 0;
  if (n == 0) keys.fail("vocab_size", "required key is missing, and no tokenizer.ggml.tokens");
  if ((tokens && n_token != n) || (embd && n_row != n) || n > kMaxVocab) {
    std::string what = key ? "vocab_size " + std::to_string(*key) : "no vocab_size";
    if (tokens) what += ", tokenizer.ggml.tokens has " + std::to_string(n_token);
    if (embd) what += ", token_embd.weight has " + std::to_string(n_row) + " rows";
    keys.fail("vocab_size", "sizes of the vocabulary differ: " + what);
  }
  return n;
}

// A key and a tensor that must say the same; where the file has no such tensor the plan says so.
void must_agree(KeyReader& keys, std::string_view key, std::int64_t n, const TensorIndex& index,
                Role role, int layer, std::size_t axis) {
  const FoundTensor f = index.find(role, layer);
  if (!f || f.tensor->dims.at(axis) == n) return;
  keys.fail(key,
            "found " + std::to_string(n) + ", but " + f.tensor->name + " is " + f.tensor->shape());
}

void check_against_tensors(KeyReader& keys, const TensorIndex& index, ModelConfig& c) {
  const auto value_len = keys.optional_integer("attention.value_length_mla", 1, kMaxWidth);
  c.value_len = value_len.value_or(0);
  for (int il = 0; il < c.n_layer; ++il) {
    const LayerConfig& l = c.layers[static_cast<std::size_t>(il)];
    if (l.is_mla) {
      if (const FoundTensor q = index.find(Role::kMlaQA, il); q && c.q_latent == 0) {
        keys.fail("attention.q_lora_rank", "key is missing, but " + q.tensor->name + " is there");
      }
      must_agree(keys, "attention.q_lora_rank", c.q_latent, index, Role::kMlaQA, il, 1);
      if (const FoundTensor v = index.find(Role::kMlaVB, il); v && c.value_len == 0) {
        c.value_len = std::min(v.tensor->dims[1], kMaxWidth);
      }
      must_agree(keys, "attention.value_length_mla", c.value_len, index, Role::kMlaVB, il, 1);
    } else {
      must_agree(keys, "attention.head_count", c.n_head, index, Role::kKdaBeta, il, 1);
    }
    if (l.is_dense) continue;
    must_agree(keys, "expert_latent_length", c.moe_latent, index, Role::kExpertGate, il, 0);
    must_agree(keys, "expert_count", c.n_expert, index, Role::kExpertGate, il, 2);
    must_agree(keys, "expert_count", c.n_expert, index, Role::kRouter, il, 1);
  }
  const bool any_mla =
      std::any_of(c.layers.begin(), c.layers.end(), [](const auto& l) { return l.is_mla; });
  if (any_mla && c.value_len == 0) {
    keys.fail("attention.value_length_mla", "key is missing, and so is attn_v_b");
  }
  const auto n_shared = keys.optional_integer("expert_shared_count", 0, kMaxExperts);
  const auto bare = std::find_if(c.layers.begin(), c.layers.end(), [](const LayerConfig& l) {
    return !l.is_dense && l.ffn_shared == 0;
  });
  if (n_shared.value_or(0) > 0 && bare != c.layers.end()) {
    keys.fail("expert_shared_count",
              "found " + std::to_string(*n_shared) + ", but " +
                  tensor_name(Role::kSharedGate, static_cast<int>(bare - c.layers.begin())) +
                  " is missing");
  }
}

// Width-pruned files may leave the key as it was: the tensors decide, and the user is told.
void note_widths(KeyReader& keys, const ModelConfig& c, std::vector<std::string>& dialects) {
  const auto expert = keys.per_layer("expert_feed_forward_length", c.n_layer, kMaxWidth);
  if (expert.empty()) {
    keys.fail("expert_feed_forward_length", "required key is missing; it has no default");
  }
  const auto dense = keys.per_layer("feed_forward_length", c.n_layer, kMaxWidth);
  const auto note = [&](const char* key, std::int64_t said, const char* tensor, std::int64_t is) {
    dialects.push_back(std::string(key) + " " + std::to_string(said) + ", but " + tensor + " is " +
                       std::to_string(is) + " wide: the tensor's width is used");
  };
  for (std::size_t il = 0; il < c.layers.size(); ++il) {
    const LayerConfig& l = c.layers[il];
    if (!l.is_dense && l.ffn_expert > 0 && l.ffn_expert != expert[il]) {
      return note("expert_feed_forward_length", expert[il], "ffn_gate_exps", l.ffn_expert);
    }
    if (l.is_dense && l.ffn_dense > 0 && !dense.empty() && l.ffn_dense != dense[il]) {
      return note("feed_forward_length", dense[il], "ffn_gate", l.ffn_dense);
    }
  }
}

}  // namespace

ModelConfig read_model_config(const Metadata& meta, const std::vector<TensorInfo>& tensors,
                              const std::string& file, std::vector<std::string>& dialects) {
  check_architecture(meta, file);
  const TensorIndex index(tensors, file);
  KeyReader keys(meta, file, dialects);
  ModelConfig c;
  c.name = meta.get<std::string>("general.name").value_or("");
  c.n_layer = keys.integer("block_count", 1, kMaxLayers);
  c.hidden = keys.integer("embedding_length", 1, kMaxWidth);
  c.n_ctx = keys.integer("context_length", 1, kMaxContext);
  read_attention(keys, c);
  read_experts(keys, c);
  c.bank_block = keys.integer("attn_res.block_size", 1, kMaxLayers);
  c.situ.beta = keys.number("activation.situ_beta");
  c.situ.lambda = keys.number("activation.situ_linear_beta");
  if (!(c.situ.beta > 0)) {
    keys.fail("activation.situ_beta",
              "found " + std::to_string(c.situ.beta) + ", expected a positive number");
  }
  const auto kv_heads = keys.per_layer("attention.head_count_kv", c.n_layer, kMaxHeads);
  if (kv_heads.empty()) {
    keys.fail("attention.head_count_kv", "required key is missing; it has no default");
  }
  c.n_vocab = read_vocab(keys, meta, index);
  read_layers(kv_heads, index, file, c);
  check_against_tensors(keys, index, c);
  note_widths(keys, c, dialects);
  return c;
}

}  // namespace k3
