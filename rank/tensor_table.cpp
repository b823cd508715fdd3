#include "rank/tensor_table.h"

#include <array>
#include <cstddef>
#include <stdexcept>

namespace k3 {
namespace {

struct RoleRow {
  Role role;
  const char* name;  // of the role, in listings
  const char* file;  // in the file, after "blk.N." for a layer's tensor
  Cut full;          // ShardPolicy::kFull
  Cut experts_only;  // ShardPolicy::kExpertsOnly
};

constexpr Cut kAll = Cut::kReplicate;

// In the order of Role. Row cuts need no sum; column cuts leave partial sums of full width.
constexpr std::array<RoleRow, static_cast<std::size_t>(Role::kCount)> kRoles{{
    {Role::kTokenEmbd, "token_embd", "token_embd.weight", Cut::kRows, kAll},
    {Role::kOutput, "output", "output.weight", Cut::kRows, Cut::kRows},
    {Role::kOutputNorm, "output_norm", "output_norm.weight", kAll, kAll},
    {Role::kOutputResScore, "output_res_score", "output_res_score.weight", kAll, kAll},
    {Role::kAttnNorm, "attn_norm", "attn_norm.weight", kAll, kAll},
    {Role::kFfnNorm, "ffn_norm", "ffn_norm.weight", kAll, kAll},
    {Role::kAttnResScore, "attn_res_score", "attn_res_score.weight", kAll, kAll},
    {Role::kFfnResScore, "ffn_res_score", "ffn_res_score.weight", kAll, kAll},
    {Role::kAttnOutput, "attn_output", "attn_output.weight", Cut::kColumns, kAll},
    {Role::kKdaQ, "kda_q", "attn_q.weight", Cut::kRows, kAll},
    {Role::kKdaK, "kda_k", "attn_k.weight", Cut::kRows, kAll},
    {Role::kKdaV, "kda_v", "attn_v.weight", Cut::kRows, kAll},
    {Role::kKdaConvQ, "kda_conv_q", "ssm_conv1d_q.weight", Cut::kRows, kAll},
    {Role::kKdaConvK, "kda_conv_k", "ssm_conv1d_k.weight", Cut::kRows, kAll},
    {Role::kKdaConvV, "kda_conv_v", "ssm_conv1d_v.weight", Cut::kRows, kAll},
    {Role::kKdaFA, "kda_f_a", "ssm_f_a.weight", kAll, kAll},
    {Role::kKdaFB, "kda_f_b", "ssm_f_b.weight", Cut::kRows, kAll},
    {Role::kKdaDt, "kda_dt", "ssm_dt.bias", Cut::kColumns, kAll},
    {Role::kKdaA, "kda_a", "ssm_a", Cut::kColumns, kAll},
    {Role::kKdaBeta, "kda_beta", "ssm_beta.weight", Cut::kRows, kAll},
    {Role::kKdaG, "kda_g", "ssm_g.weight", Cut::kRows, kAll},
    {Role::kKdaNorm, "kda_norm", "ssm_norm.weight", kAll, kAll},
    {Role::kMlaQA, "mla_q_a", "attn_q_a.weight", kAll, kAll},
    {Role::kMlaQANorm, "mla_q_a_norm", "attn_q_a_norm.weight", kAll, kAll},
    {Role::kMlaQB, "mla_q_b", "attn_q_b.weight", Cut::kRows, kAll},
    {Role::kMlaQ, "mla_q", "attn_q.weight", Cut::kRows, kAll},
    {Role::kMlaKvA, "mla_kv_a", "attn_kv_a_mqa.weight", kAll, kAll},
    {Role::kMlaKvANorm, "mla_kv_a_norm", "attn_kv_a_norm.weight", kAll, kAll},
    {Role::kMlaKB, "mla_k_b", "attn_k_b.weight", Cut::kMatrices, kAll},
    {Role::kMlaVB, "mla_v_b", "attn_v_b.weight", Cut::kMatrices, kAll},
    {Role::kMlaGate, "mla_gate", "attn_gate.weight", Cut::kRows, kAll},
    {Role::kDenseGate, "dense_gate", "ffn_gate.weight", Cut::kRows, kAll},
    {Role::kDenseUp, "dense_up", "ffn_up.weight", Cut::kRows, kAll},
    {Role::kDenseDown, "dense_down", "ffn_down.weight", Cut::kColumns, kAll},
    {Role::kRouter, "router", "ffn_gate_inp.weight", Cut::kRows, kAll},
    {Role::kRouterBias, "router_bias", "exp_probs_b.bias", kAll, kAll},
    {Role::kExpertGate, "expert_gate", "ffn_gate_exps.weight", Cut::kMatricesRows, Cut::kMatrices},
    {Role::kExpertUp, "expert_up", "ffn_up_exps.weight", Cut::kMatricesRows, Cut::kMatrices},
    {Role::kExpertDown, "expert_down", "ffn_down_exps.weight", Cut::kMatricesColumns,
     Cut::kMatrices},
    {Role::kRoutedDown, "routed_down", "ffn_routed_down.weight", Cut::kRows, kAll},
    {Role::kRoutedUp, "routed_up", "ffn_routed_up.weight", Cut::kColumns, kAll},
    {Role::kRoutedNorm, "routed_norm", "ffn_routed_norm.weight", kAll, kAll},
    {Role::kSharedGate, "shared_gate", "ffn_gate_shexp.weight", Cut::kRows, kAll},
    {Role::kSharedUp, "shared_up", "ffn_up_shexp.weight", Cut::kRows, kAll},
    {Role::kSharedDown, "shared_down", "ffn_down_shexp.weight", Cut::kColumns, kAll},
}};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kRoles.size(); ++i) {
    if (kRoles[i].role != static_cast<Role>(i)) return false;
  }
  return true;
}
static_assert(in_order());

const RoleRow& row(Role role) { return kRoles.at(static_cast<std::size_t>(role)); }

// Other spellings of a tensor; with `file2` the tensor is the elementwise product of the two.
struct Alias {
  Role role;
  const char* file;
  const char* file2;
  const char* line;
};

constexpr std::array kAliases{
    Alias{Role::kOutputResScore, "output_res_norm.weight", "output_res_proj.weight",
          "output_res_score kept as output_res_norm and output_res_proj: multiplied"},
    Alias{Role::kAttnResScore, "attn_res_norm.weight", "attn_res_proj.weight",
          "attn_res_score kept as attn_res_norm and attn_res_proj: multiplied"},
    Alias{Role::kFfnResScore, "ffn_res_norm.weight", "ffn_res_proj.weight",
          "ffn_res_score kept as ffn_res_norm and ffn_res_proj: multiplied"},
    Alias{Role::kRoutedDown, "ffn_latent_down.weight", nullptr,
          "ffn_routed_down spelled ffn_latent_down"},
    Alias{Role::kRoutedUp, "ffn_latent_up.weight", nullptr, "ffn_routed_up spelled ffn_latent_up"},
    Alias{Role::kRoutedNorm, "ffn_latent_norm.weight", nullptr,
          "ffn_routed_norm spelled ffn_latent_norm"},
    Alias{Role::kKdaG, "attn_gate.weight", nullptr, "ssm_g of KDA layers spelled attn_gate"},
};

std::string in_layer(const char* file, int layer) {
  return layer < 0 ? std::string(file) : "blk." + std::to_string(layer) + "." + file;
}

Shape kda_shape(const ModelConfig& c, Role role) {
  const Axis hidden{c.hidden, "embedding_length"};
  const Axis head{c.kda_head_dim, "kda.head_dim"};
  const Axis width{c.kda_width(), "attention.head_count * kda.head_dim"};
  switch (role) {
    case Role::kKdaConvQ:
    case Role::kKdaConvK:
    case Role::kKdaConvV:
      return {{c.conv_kernel, "ssm.conv_kernel"}, width};
    case Role::kKdaFA:
      return {hidden, head};
    case Role::kKdaFB:
      return {head, width};
    case Role::kKdaDt:
      return {width};
    case Role::kKdaA:
      return {{c.n_head, "attention.head_count"}};
    case Role::kKdaBeta:
      return {hidden, {c.n_head, "attention.head_count"}};
    case Role::kKdaNorm:
      return {head};
    default:  // q, k, v, g
      return {hidden, width};
  }
}

Shape mla_shape(const ModelConfig& c, Role role) {
  const Axis hidden{c.hidden, "embedding_length"};
  const Axis heads{c.n_head, "attention.head_count"};
  const Axis q_latent{c.q_latent, "attention.q_lora_rank"};
  const Axis kv_latent{c.kv_latent, "attention.kv_lora_rank"};
  const Axis keys{c.n_head * c.key_len, "attention.head_count * attention.key_length_mla"};
  switch (role) {
    case Role::kMlaQA:
      return {hidden, q_latent};
    case Role::kMlaQANorm:
      return {q_latent};
    case Role::kMlaQB:
      return {q_latent, keys};
    case Role::kMlaQ:
      return {hidden, keys};
    case Role::kMlaKvA:
      return {hidden, {c.cache_row(), "attention.kv_lora_rank + rope.dimension_count"}};
    case Role::kMlaKvANorm:
      return {kv_latent};
    case Role::kMlaKB:
      return {{c.nope(), "attention.key_length_mla - rope.dimension_count"}, kv_latent, heads};
    case Role::kMlaVB:
      return {kv_latent, {c.value_len, "attention.value_length_mla"}, heads};
    default:  // gate
      return {hidden,
              {c.n_head * c.value_len, "attention.head_count * attention.value_length_mla"}};
  }
}

Shape ffn_shape(const ModelConfig& c, Role role, int layer) {
  const LayerConfig& l = c.layers.at(static_cast<std::size_t>(layer));
  const Axis hidden{c.hidden, "embedding_length"};
  const Axis experts{c.n_expert, "expert_count"};
  const Axis latent{c.moe_latent, "expert_latent_length"};
  const Axis dense{l.ffn_dense, "rows of ffn_gate"};
  const Axis ffn{l.ffn_expert, "rows of ffn_gate_exps"};
  const Axis shared{l.ffn_shared, "rows of ffn_gate_shexp"};
  switch (role) {
    case Role::kDenseGate:
    case Role::kDenseUp:
      return {hidden, dense};
    case Role::kDenseDown:
      return {dense, hidden};
    case Role::kRouter:
      return {hidden, experts};
    case Role::kRouterBias:
      return {experts};
    case Role::kExpertGate:
    case Role::kExpertUp:
      return {latent, ffn, experts};
    case Role::kExpertDown:
      return {ffn, latent, experts};
    case Role::kRoutedDown:
      return {hidden, latent};
    case Role::kRoutedUp:
      return {latent, hidden};
    case Role::kRoutedNorm:
      return {latent};
    case Role::kSharedGate:
    case Role::kSharedUp:
      return {hidden, shared};
    default:  // shared down
      return {shared, hidden};
  }
}

}  // namespace

const char* role_name(Role role) { return row(role).name; }

bool is_conv(Role role) {
  return role == Role::kKdaConvQ || role == Role::kKdaConvK || role == Role::kKdaConvV;
}

const char* cut_name(Cut cut) {
  switch (cut) {
    case Cut::kReplicate:
      return "replicate";
    case Cut::kRows:
      return "rows";
    case Cut::kColumns:
      return "columns";
    case Cut::kMatrices:
      return "matrices";
    case Cut::kMatricesRows:
      return "matrices x rows";
    case Cut::kMatricesColumns:
      return "matrices x columns";
  }
  return "?";
}

std::string tensor_name(Role role, int layer) { return in_layer(row(role).file, layer); }

Cut cut_of(Role role, ShardPolicy policy) {
  return policy == ShardPolicy::kFull ? row(role).full : row(role).experts_only;
}

std::vector<Role> global_roles() {
  return {Role::kTokenEmbd, Role::kOutputResScore, Role::kOutputNorm, Role::kOutput};
}

std::vector<Role> layer_roles(const ModelConfig& config, int layer) {
  const LayerConfig& l = config.layers.at(static_cast<std::size_t>(layer));
  std::vector<Role> roles{Role::kAttnResScore, Role::kAttnNorm};
  const auto add = [&](std::initializer_list<Role> more) { roles.insert(roles.end(), more); };
  if (l.is_mla) {
    if (config.q_latent > 0) {
      add({Role::kMlaQA, Role::kMlaQANorm, Role::kMlaQB});
    } else {
      add({Role::kMlaQ});
    }
    add({Role::kMlaKvA, Role::kMlaKvANorm, Role::kMlaKB, Role::kMlaVB});
    if (l.has_attn_gate) add({Role::kMlaGate});
  } else {
    add({Role::kKdaQ, Role::kKdaK, Role::kKdaV, Role::kKdaConvQ, Role::kKdaConvK, Role::kKdaConvV,
         Role::kKdaFA, Role::kKdaFB, Role::kKdaDt, Role::kKdaA, Role::kKdaBeta, Role::kKdaG,
         Role::kKdaNorm});
  }
  add({Role::kAttnOutput, Role::kFfnResScore, Role::kFfnNorm});
  if (l.is_dense) {
    add({Role::kDenseGate, Role::kDenseUp, Role::kDenseDown});
    return roles;
  }
  add({Role::kRouter, Role::kRouterBias, Role::kRoutedDown, Role::kExpertGate, Role::kExpertUp,
       Role::kExpertDown});
  if (l.has_routed_norm) add({Role::kRoutedNorm});
  add({Role::kRoutedUp});
  if (l.ffn_shared > 0) add({Role::kSharedGate, Role::kSharedUp, Role::kSharedDown});
  return roles;
}

Shape shape_of(const ModelConfig& config, Role role, int layer) {
  const Axis hidden{config.hidden, "embedding_length"};
  switch (role) {
    case Role::kTokenEmbd:
    case Role::kOutput:
      return {hidden, {config.n_vocab, "vocab_size"}};
    case Role::kOutputNorm:
    case Role::kOutputResScore:
    case Role::kAttnNorm:
    case Role::kFfnNorm:
    case Role::kAttnResScore:
    case Role::kFfnResScore:
      return {hidden};
    case Role::kAttnOutput:
      if (config.layers.at(static_cast<std::size_t>(layer)).is_mla) {
        return {mla_shape(config, Role::kMlaGate)[1], hidden};
      }
      return {kda_shape(config, Role::kKdaDt)[0], hidden};
    default:
      break;
  }
  if (role <= Role::kKdaNorm) return kda_shape(config, role);
  if (role <= Role::kMlaGate) return mla_shape(config, role);
  return ffn_shape(config, role, layer);
}

TensorIndex::TensorIndex(const std::vector<TensorInfo>& tensors, const std::string& file) {
  by_name_.reserve(tensors.size());
  for (const TensorInfo& t : tensors) {
    if (!by_name_.emplace(t.name, &t).second) {
      throw std::invalid_argument(file + ": " + printable(t.name) + ": two tensors of this name");
    }
  }
}

const TensorInfo* TensorIndex::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : it->second;
}

FoundTensor TensorIndex::find(Role role, int layer) const {
  if (const TensorInfo* t = find(tensor_name(role, layer))) return {t, nullptr, nullptr};
  for (const Alias& a : kAliases) {
    if (a.role != role) continue;
    const TensorInfo* t = find(in_layer(a.file, layer));
    const TensorInfo* second = a.file2 ? find(in_layer(a.file2, layer)) : nullptr;
    if (t && (second || !a.file2)) return {t, second, a.line};
  }
  return {};
}

}  // namespace k3
