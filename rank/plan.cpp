#include "rank/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>

#include "rank/tensor_table.h"

namespace k3 {
namespace {

constexpr std::size_t kMaxListed = 5;

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw std::invalid_argument(file + ": " + what);
}

std::string join(const std::vector<std::string>& items, const char* between, std::size_t most) {
  std::string out;
  for (std::size_t i = 0; i < std::min(items.size(), most); ++i) {
    if (i > 0) out += between;
    out += items[i];
  }
  if (items.size() > most) out += " and " + std::to_string(items.size() - most) + " more";
  return out;
}

// Fused tensors are refused and not split: the reference engine fails on them, so nothing shows in which order their
// rows lie.
void refuse_fused(const TensorIndex& index, const ModelConfig& config, const std::string& file) {
  for (int il = 0; il < config.n_layer; ++il) {
    const std::string blk = "blk." + std::to_string(il) + ".";
    for (const auto& [name, parts] : {std::pair{"attn_qkv.weight", "attn_q, attn_k and attn_v"},
                                      std::pair{"attn_kv_b.weight", "attn_k_b and attn_v_b"}}) {
      if (index.find(blk + name)) {
        fail(file, blk + name + ": fused tensors are not supported, expected " + parts +
                       " (convert the model again)");
      }
    }
  }
}

std::vector<std::int64_t> without_ones(std::span<const std::int64_t> dims) {
  std::vector<std::int64_t> out;
  std::copy_if(dims.begin(), dims.end(), std::back_inserter(out),
               [](std::int64_t n) { return n != 1; });
  return out;
}

bool same_shape(const TensorInfo& t, const Shape& want, bool any_ones) {
  std::vector<std::int64_t> dims;
  for (const Axis& a : want) dims.push_back(a.n);
  if (any_ones) return without_ones(t.dims) == without_ones(dims);
  dims.resize(t.dims.size(), 1);
  return std::equal(dims.begin(), dims.end(), t.dims.begin());
}

void check_shape(const TensorInfo& t, const Shape& want, bool any_ones, const std::string& file) {
  if (same_shape(t, want, any_ones)) return;
  std::vector<std::string> numbers, names;
  for (const Axis& a : want) {
    numbers.push_back(std::to_string(a.n));
    names.emplace_back(a.what);
  }
  fail(file, t.name + ": shape " + t.shape() + ", expected [" + join(numbers, ", ", 4) + "] (" +
                 join(names, ", ", 4) + ")");
}

// Fills in one tensor from what the file has. Axes of length 1 do not change where an element lies, so convolution
// weights may have theirs anywhere ([C,1,d,1], [C,1,d], [C,d] are the same bytes).
PlannedTensor planned(const ModelConfig& config, Role role, int layer, const FoundTensor& found,
                      ShardPolicy policy, const std::string& file) {
  const Shape want = shape_of(config, role, layer);
  PlannedTensor p;
  p.role = role;
  p.layer = layer;
  p.name = found.tensor->name;
  p.type = found.tensor->type;
  p.cut = cut_of(role, policy);
  for (std::size_t i = 0; i < want.size(); ++i) p.dims[i] = want[i].n;
  p.n_col = p.dims[0];
  if (role == Role::kKdaA) {
    p.transform = Transform::kNegAbs;
    const std::vector<std::int64_t> dims = without_ones(found.tensor->dims);
    if (dims.size() == 1 && dims[0] > p.n_col)
      p.dims[0] = dims[0];
    else
      check_shape(*found.tensor, want, true, file);
  } else {
    check_shape(*found.tensor, want, is_conv(role), file);
  }
  if (found.second) {
    check_shape(*found.second, want, false, file);
    p.transform = Transform::kProduct;
    p.name2 = found.second->name;
    p.type2 = found.second->type;
  }
  for (const TensorInfo* t : {found.tensor, found.second}) {
    if (t && p.dims[0] % traits(t->type).elems != 0) {
      fail(file, t->name + ": a row of " + std::to_string(p.dims[0]) +
                     " elements, expected a multiple of " + std::to_string(traits(t->type).elems) +
                     " for " + traits(t->type).name);
    }
  }
  return p;
}

// Collects what is found, missing and left over, and says it all in one error.
class Matcher {
 public:
  Matcher(const ModelConfig& config, const std::vector<TensorInfo>& tensors,
          const TensorIndex& index, ShardPolicy policy, const std::string& file)
      : config_(config), tensors_(tensors), index_(index), policy_(policy), file_(file) {}

  void match(Role role, int layer) {
    const FoundTensor f = index_.find(role, layer);
    if (!f) {
      missing_.push_back(tensor_name(role, layer));
      return;
    }
    used_.insert(f.tensor->name);
    if (f.second) used_.insert(f.second->name);
    if (f.dialect) ++dialects_[f.dialect];
    found_.push_back({role, layer, f});
  }

  std::vector<PlannedTensor> finish(std::vector<std::string>& dialects) {
    for (const auto& [line, n] : dialects_) {
      dialects.push_back(line + (n > 1 ? " (" + std::to_string(n) + " times)" : ""));
    }
    refuse_leftovers(dialects);
    std::vector<PlannedTensor> out;
    int n_padded = 0;
    int n_flat = 0;
    for (const Match& m : found_) {
      out.push_back(planned(config_, m.role, m.layer, m.found, policy_, file_));
      n_padded += out.back().n_col != out.back().dims[0];
      n_flat += is_conv(m.role) && m.found.tensor->n_dims == 2;
    }
    if (n_padded > 0) {
      dialects.push_back("ssm_a longer than the " + std::to_string(config_.n_head) +
                         " heads: the rest is ignored (" + std::to_string(n_padded) + " times)");
    }
    if (n_flat > 0) {
      dialects.push_back("ssm_conv1d of two dimensions (" + std::to_string(n_flat) + " times)");
    }
    return out;
  }

 private:
  struct Match {
    Role role;
    int layer;
    FoundTensor found;
  };

  void refuse_leftovers(const std::vector<std::string>& dialects) const {
    std::vector<std::string> unknown;
    for (const TensorInfo& t : tensors_) {
      if (!used_.contains(t.name)) unknown.push_back(printable(t.name));
    }
    if (missing_.empty() && unknown.empty()) return;
    std::vector<std::string> what;
    if (!missing_.empty()) {
      what.push_back(std::to_string(missing_.size()) +
                     " tensors are missing: " + join(missing_, ", ", kMaxListed));
    }
    if (!unknown.empty()) {
      what.push_back(std::to_string(unknown.size()) +
                     " tensors have no use here: " + join(unknown, ", ", kMaxListed));
    }
    what.push_back("naming: " + (dialects.empty() ? "standard" : join(dialects, ", ", kMaxListed)));
    fail(file_, join(what, "; ", what.size()));
  }

  const ModelConfig& config_;
  const std::vector<TensorInfo>& tensors_;
  const TensorIndex& index_;
  ShardPolicy policy_;
  const std::string& file_;
  std::vector<Match> found_;
  std::vector<std::string> missing_;
  std::set<std::string_view> used_;
  std::map<std::string, int> dialects_;
};

std::string divisors_of(int n) {
  std::vector<std::string> out;
  for (int d = 1; d <= n; ++d) {
    if (n % d == 0) out.push_back(std::to_string(d));
  }
  return join(out, ", ", out.size());
}

constexpr int kMaxWorld = 4096;

void check_layout(const Layout& layout, std::int64_t n_layer) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (layout.tp < 1 || layout.tp > kMaxWorld) {
    refuse("--tp " + std::to_string(layout.tp) + ": valid: 1 to " + std::to_string(kMaxWorld));
  }
  if (layout.pp < 1 || layout.pp > n_layer) {
    refuse("--pp " + std::to_string(layout.pp) + ": valid: 1 to " + std::to_string(n_layer) +
           ", as many stages as the model has layers");
  }
  if (layout.kv_shard && layout.policy == ShardPolicy::kExpertsOnly)
    refuse(
        "--kv-shard: policy experts-only keeps attention whole on every rank: valid: --policy "
        "full");
  const int groups = layout.expert_groups;
  if (groups == 0) return;
  if (groups < 0 || groups > layout.tp || layout.tp % groups != 0) {
    refuse("--expert-groups " + std::to_string(groups) + ": must divide --tp " +
           std::to_string(layout.tp) + "; valid: " + divisors_of(layout.tp));
  }
  if (layout.policy == ShardPolicy::kExpertsOnly && groups != layout.tp) {
    refuse("--expert-groups " + std::to_string(groups) +
           ": policy experts-only cuts by expert: " + "valid: 0 or " + std::to_string(layout.tp));
  }
}

}  // namespace

Plan Plan::make(const ModelConfig& config, const std::vector<TensorInfo>& tensors,
                const Layout& layout, const std::string& file) {
  check_layout(layout, config.n_layer);
  const TensorIndex index(tensors, file);
  refuse_fused(index, config, file);
  Matcher matcher(config, tensors, index, layout.policy, file);
  for (const Role role : global_roles()) matcher.match(role, -1);
  for (int il = 0; il < config.n_layer; ++il) {
    for (const Role role : layer_roles(config, il)) matcher.match(role, il);
  }
  Plan plan;
  plan.config_ = config;
  plan.layout_ = layout;
  plan.tensors_ = matcher.finish(plan.dialects_);
  constexpr auto n_role = static_cast<std::size_t>(Role::kCount);
  plan.index_.assign(n_role * static_cast<std::size_t>(config.n_layer + 1), -1);
  for (std::size_t i = 0; i < plan.tensors_.size(); ++i) {
    const PlannedTensor& t = plan.tensors_[i];
    plan.index_[static_cast<std::size_t>(t.layer + 1) * n_role + static_cast<std::size_t>(t.role)] =
        static_cast<int>(i);
  }
  plan.expert_groups_ = plan.choose_expert_groups();
  plan.layout_.expert_groups = plan.expert_groups_;
  return plan;
}

const PlannedTensor* Plan::find(Role role, int layer) const {
  const std::size_t i =
      static_cast<std::size_t>(layer + 1) * static_cast<std::size_t>(Role::kCount) +
      static_cast<std::size_t>(role);
  if (layer < -1 || i >= index_.size() || index_[i] < 0) return nullptr;
  return &tensors_[static_cast<std::size_t>(index_[i])];
}

std::int64_t Plan::granule(Role role, int layer) const {
  const PlannedTensor* t = find(role, layer);
  return t ? traits(t->type).granule : 1;
}

// As few expert groups as the width allows: a token's experts then fall evenly on the ranks. More groups only where a
// band of the narrowest expert would be left without a granule.
int Plan::choose_expert_groups() const {
  if (layout_.policy == ShardPolicy::kExpertsOnly) return layout_.tp;
  if (layout_.expert_groups > 0) return layout_.expert_groups;
  std::int64_t n_granule = layout_.tp;
  for (int il = 0; il < config_.n_layer; ++il) {
    const LayerConfig& l = config_.layers[static_cast<std::size_t>(il)];
    if (!l.is_dense) n_granule = std::min(n_granule, l.ffn_expert / granule(Role::kExpertDown, il));
  }
  for (int groups = 1; groups < layout_.tp; ++groups) {
    if (layout_.tp % groups == 0 && n_granule >= layout_.tp / groups) return groups;
  }
  return layout_.tp;
}

Band Plan::layers(int rank) const {
  return band_of(config_.n_layer, layout_.stage(rank), layout_.pp);
}

bool Plan::has_embedding(int rank) const { return layout_.stage(rank) == 0; }

bool Plan::has_head(int rank) const { return layout_.stage(rank) == layout_.pp - 1; }

bool Plan::has_layer(int rank, int layer) const {
  const Band b = layers(rank);
  return layer >= b.begin && layer < b.end;
}

// A layer's axis of n elements over the ranks of its stage, or whole where the policy leaves it whole.
Band Plan::layer_band(int rank, int layer, std::int64_t n, std::int64_t unit) const {
  if (!has_layer(rank, layer)) return {};
  if (layout_.policy == ShardPolicy::kExpertsOnly) return {0, n};
  return band_of(n, layout_.tp_rank(rank), layout_.tp, unit);
}

std::int64_t Plan::head_width(int layer) const {
  return config_.layers[static_cast<std::size_t>(layer)].is_mla ? config_.value_len
                                                                : config_.kda_head_dim;
}

// Heads are handed out in the smallest numbers whose columns of attn_output end on a scale group.
Band Plan::heads(int rank, int layer) const {
  const std::int64_t g = granule(Role::kAttnOutput, layer);
  return layer_band(rank, layer, config_.n_head, g / std::gcd(g, head_width(layer)));
}

Band Plan::vocab_in(int rank) const {
  if (!has_embedding(rank)) return {};
  if (layout_.policy == ShardPolicy::kExpertsOnly) return {0, config_.n_vocab};
  return band_of(config_.n_vocab, layout_.tp_rank(rank), layout_.tp);
}

Band Plan::vocab_out(int rank) const {
  if (!has_head(rank)) return {};
  return band_of(config_.n_vocab, layout_.tp_rank(rank), layout_.tp);
}

Band Plan::experts(int rank, int layer) const {
  if (!has_layer(rank, layer) || is_dense(layer)) return {};
  const int bands = layout_.tp / expert_groups_;
  return band_of(config_.n_expert, layout_.tp_rank(rank) / bands, expert_groups_);
}

Band Plan::expert_ffn(int rank, int layer) const {
  if (!has_layer(rank, layer) || is_dense(layer)) return {};
  const int bands = layout_.tp / expert_groups_;
  return band_of(config_.layers[static_cast<std::size_t>(layer)].ffn_expert,
                 layout_.tp_rank(rank) % bands, bands, granule(Role::kExpertDown, layer));
}

Band Plan::dense_ffn(int rank, int layer) const {
  return layer_band(rank, layer, config_.layers[static_cast<std::size_t>(layer)].ffn_dense,
                    granule(Role::kDenseDown, layer));
}

Band Plan::shared_ffn(int rank, int layer) const {
  return layer_band(rank, layer, config_.layers[static_cast<std::size_t>(layer)].ffn_shared,
                    granule(Role::kSharedDown, layer));
}

Band Plan::router_rows(int rank, int layer) const {
  return layer_band(rank, layer, is_dense(layer) ? 0 : config_.n_expert, 1);
}

Band Plan::latent_rows(int rank, int layer) const {
  return layer_band(rank, layer, is_dense(layer) ? 0 : config_.moe_latent, 1);
}

Band Plan::latent_columns(int rank, int layer) const {
  return layer_band(rank, layer, is_dense(layer) ? 0 : config_.moe_latent,
                    granule(Role::kRoutedUp, layer));
}

bool Plan::is_dense(int layer) const {
  return config_.layers[static_cast<std::size_t>(layer)].is_dense;
}

bool Plan::holds(const PlannedTensor& t, int rank) const {
  if (t.layer >= 0) return has_layer(rank, t.layer);
  return t.role == Role::kTokenEmbd ? has_embedding(rank) : has_head(rank);
}

Box Plan::box(const PlannedTensor& t, int rank) const {
  if (!holds(t, rank)) return {};
  Box b{{Band{0, t.n_col}, Band{0, t.dims[1]}, Band{0, t.dims[2]}}};
  if (t.cut == Cut::kReplicate) return b;
  const auto wide_heads = [&](std::int64_t width) {
    const Band h = heads(rank, t.layer);
    return Band{h.begin * width, h.end * width};
  };
  switch (t.role) {
    case Role::kTokenEmbd:
      b.axis[1] = vocab_in(rank);
      break;
    case Role::kOutput:
      b.axis[1] = vocab_out(rank);
      break;
    case Role::kAttnOutput:
      b.axis[0] = wide_heads(head_width(t.layer));
      break;
    case Role::kKdaQ:
    case Role::kKdaK:
    case Role::kKdaV:
    case Role::kKdaG:
    case Role::kKdaFB:
    case Role::kKdaConvQ:
    case Role::kKdaConvK:
    case Role::kKdaConvV:
    case Role::kMlaGate:
      b.axis[1] = wide_heads(head_width(t.layer));
      break;
    case Role::kKdaDt:
      b.axis[0] = wide_heads(config_.kda_head_dim);
      break;
    case Role::kKdaA:
      b.axis[0] = heads(rank, t.layer);
      break;
    case Role::kKdaBeta:
      b.axis[1] = heads(rank, t.layer);
      break;
    case Role::kMlaQ:
    case Role::kMlaQB:
      b.axis[1] = wide_heads(config_.key_len);
      break;
    case Role::kMlaKB:
    case Role::kMlaVB:
      b.axis[2] = heads(rank, t.layer);
      break;
    case Role::kDenseGate:
    case Role::kDenseUp:
      b.axis[1] = dense_ffn(rank, t.layer);
      break;
    case Role::kDenseDown:
      b.axis[0] = dense_ffn(rank, t.layer);
      break;
    case Role::kRouter:
      b.axis[1] = router_rows(rank, t.layer);
      break;
    case Role::kExpertGate:
    case Role::kExpertUp:
      b.axis[1] = expert_ffn(rank, t.layer);
      b.axis[2] = experts(rank, t.layer);
      break;
    case Role::kExpertDown:
      b.axis[0] = expert_ffn(rank, t.layer);
      b.axis[2] = experts(rank, t.layer);
      break;
    case Role::kRoutedDown:
      b.axis[1] = latent_rows(rank, t.layer);
      break;
    case Role::kRoutedUp:
      b.axis[0] = latent_columns(rank, t.layer);
      break;
    case Role::kSharedGate:
    case Role::kSharedUp:
      b.axis[1] = shared_ffn(rank, t.layer);
      break;
    case Role::kSharedDown:
      b.axis[0] = shared_ffn(rank, t.layer);
      break;
    default:
      throw std::logic_error(t.name + ": cut " + cut_name(t.cut) + " without a rule");
  }
  return b;
}

}  // namespace k3
