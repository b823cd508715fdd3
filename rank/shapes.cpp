#include "rank/shapes.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "rank/tensor_table.h"

namespace k3 {
namespace {

// A layer costs a record before anything is checked, so this bound comes before the reader's.
constexpr std::int64_t kMaxLayer = 4096;
constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;

ModelShape real_shape() {
  ModelShape s;
  s.name = "k3";
  s.n_layer = 93;
  s.n_dense = 1;
  s.hidden = 7168;
  s.n_vocab = 163840;
  s.n_ctx = 1048576;
  s.n_head = 96;
  s.kda_head_dim = 128;
  s.q_latent = 1536;
  s.kv_latent = 512;
  s.rope = 64;
  s.key_len = 192;
  s.value_len = 128;
  s.n_expert = 896;
  s.n_expert_used = 16;
  s.n_shared = 2;
  s.moe_latent = 3584;
  s.ffn_expert = 3072;
  s.ffn_dense = 33792;
  s.bank_block = 12;
  return s;
}

// Neuron: half of every routed expert's width is gone, the shared experts keep theirs.
ModelShape neuron_shape() {
  ModelShape s = real_shape();
  s.name = "k3-neuron";
  s.ffn_expert = 1536;
  s.ffn_shared = 6144;
  return s;
}

ModelShape shallow(const char* name, std::int64_t n_layer) {
  ModelShape s = real_shape();
  s.name = name;
  s.n_layer = n_layer;
  return s;
}

ModelShape nano_shape() {
  ModelShape s = real_shape();
  s.name = "k3-nano";
  s.n_layer = 9;
  s.hidden = 256;
  s.n_vocab = 2048;
  s.n_ctx = 4096;
  s.n_head = 4;
  s.q_latent = 128;
  s.n_expert = 16;
  s.n_expert_used = 4;
  s.moe_latent = 128;
  s.ffn_expert = 128;
  s.ffn_dense = 512;
  s.bank_block = 3;
  return s;
}

// Rows of 256 everywhere that matters, so that every block type fits; enough layers for three banks.
ModelShape tiny_shape() {
  ModelShape s = nano_shape();
  s.name = "tiny";
  s.n_layer = 5;
  s.n_vocab = 512;
  s.n_head = 8;
  s.kda_head_dim = 32;
  s.q_latent = 64;
  s.kv_latent = 64;
  s.rope = 16;
  s.key_len = 48;
  s.value_len = 32;
  s.n_expert = 12;
  s.moe_latent = 256;
  s.ffn_expert = 256;
  s.bank_block = 2;
  return s;
}

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& n : names) out += (out.empty() ? "" : ", ") + n;
  return out;
}

bool is_expert(Role role) {
  return role == Role::kExpertGate || role == Role::kExpertUp || role == Role::kExpertDown;
}

bool stays_f32(Role role) {
  switch (role) {
    case Role::kKdaConvQ:
    case Role::kKdaConvK:
    case Role::kKdaConvV:
    case Role::kKdaBeta:
    case Role::kRouter:
      return true;
    default:
      return false;
  }
}

void require(bool ok, const ModelShape& s, const std::string& what) {
  if (!ok) throw std::invalid_argument("shape " + s.name + ": " + what);
}

// Keys in the order and of the types that converters write.
MetadataEntries metadata_entries(const ModelConfig& c, const ModelShape& s) {
  MetadataEntries m;
  m.emplace_back("general.architecture", "kimi-k3");
  m.emplace_back("general.type", "model");
  m.emplace_back("general.name", c.name);
  m.emplace_back("general.quantization_version", std::uint32_t{2});
  const auto count = [&m](const char* key, std::int64_t n) {
    m.emplace_back("kimi-k3." + std::string(key), static_cast<std::uint32_t>(n));
  };
  const auto real = [&m](const char* key, float v) {
    m.emplace_back("kimi-k3." + std::string(key), v);
  };
  count("block_count", c.n_layer);
  count("context_length", c.n_ctx);
  count("embedding_length", c.hidden);
  count("feed_forward_length", s.ffn_dense);
  count("attention.head_count", c.n_head);
  std::vector<std::int32_t> kv_heads;
  for (const LayerConfig& l : c.layers) kv_heads.push_back(l.is_mla);
  m.emplace_back("kimi-k3.attention.head_count_kv", kv_heads);
  real("attention.layer_norm_rms_epsilon", c.rms_eps);
  count("expert_count", c.n_expert);
  count("expert_used_count", c.n_expert_used);
  count("vocab_size", c.n_vocab);
  count("ssm.conv_kernel", c.conv_kernel);
  count("kda.head_dim", c.kda_head_dim);
  if (c.gate_lower_bound) real("kda.gate_lower_bound", *c.gate_lower_bound);
  if (c.q_latent > 0) count("attention.q_lora_rank", c.q_latent);
  count("attention.kv_lora_rank", c.kv_latent);
  count("rope.dimension_count", c.rope);
  count("attention.key_length", c.cache_row());
  count("attention.key_length_mla", c.key_len);
  count("attention.value_length_mla", c.value_len);
  count("expert_feed_forward_length", s.ffn_expert);
  count("expert_shared_count", s.n_shared);
  count("leading_dense_block_count", c.n_dense);
  real("expert_weights_scale", c.expert_scale);
  m.emplace_back("kimi-k3.expert_weights_norm", c.expert_norm);
  count("expert_gating_func", 2);
  count("expert_latent_length", c.moe_latent);
  real("activation.situ_beta", c.situ.beta);
  real("activation.situ_linear_beta", c.situ.lambda);
  count("attn_res.block_size", c.bank_block);
  return m;
}

struct NamedRecipe {
  const char* name;
  BlockType experts;
  BlockType other;
  BlockType vocab;  // token_embd and output
};
// What the published files hold, by the types in them: their labels do not tell.
constexpr NamedRecipe kRecipes[] = {
    {"UD-IQ1_S", BlockType::kIQ1_S, BlockType::kQ8_0, BlockType::kQ8_0},
    {"UD-Q2_K_XL", BlockType::kIQ2_XS, BlockType::kQ8_0, BlockType::kQ8_0},
    {"UD-Q4_K_XL", BlockType::kMXFP4, BlockType::kQ8_0, BlockType::kQ8_0},
    {"UD-Q8_K_XL", BlockType::kMXFP4, BlockType::kBF16, BlockType::kBF16},
    {"Neuron-IQ1_S", BlockType::kIQ1_S, BlockType::kQ8_0, BlockType::kF16},
};

[[noreturn]] void unknown_recipe(std::string_view name) {
  throw std::invalid_argument(
      "--quant " + std::string(name) + ": valid: " + listed(recipe_names()) +
      ", a block type (F32, BF16, Q8_0, ...), or experts=TYPE,other=TYPE[,vocab=TYPE]");
}

}  // namespace

std::span<const ShapeSize> shape_sizes() {
  static constexpr ShapeSize kSizes[] = {
      {"layers", &ModelShape::n_layer, "Layers."},
      {"dense-layers", &ModelShape::n_dense, "Leading layers with a dense ffn."},
      {"mla-every", &ModelShape::mla_every,
       "Every Nth layer is MLA, and the last one; the others are KDA."},
      {"hidden", &ModelShape::hidden, "Width of the residual stream."},
      {"vocab", &ModelShape::n_vocab, "Tokens, at least 288."},
      {"ctx", &ModelShape::n_ctx, "Positions the model claims to support."},
      {"heads", &ModelShape::n_head, "Heads of KDA and MLA."},
      {"head-dim", &ModelShape::kda_head_dim, "Width of a KDA head."},
      {"conv-kernel", &ModelShape::conv_kernel, "Taps of the KDA convolution."},
      {"q-latent", &ModelShape::q_latent, "Query rank of MLA; 0: none."},
      {"kv-latent", &ModelShape::kv_latent, "Width of the MLA latent."},
      {"rope", &ModelShape::rope, "Width of the part of a key all heads share."},
      {"key-len", &ModelShape::key_len, "Width of an MLA key per head, that part included."},
      {"value-len", &ModelShape::value_len, "Width of an MLA value per head."},
      {"experts", &ModelShape::n_expert, "Routed experts."},
      {"experts-used", &ModelShape::n_expert_used, "Experts of one token."},
      {"shared", &ModelShape::n_shared, "Shared experts; 0: none."},
      {"latent", &ModelShape::moe_latent, "Width routed experts work in."},
      {"ffn-expert", &ModelShape::ffn_expert, "Inner width of one expert."},
      {"ffn-shared", &ModelShape::ffn_shared,
       "Inner width of the shared experts together; 0: that of one expert for each."},
      {"ffn-dense", &ModelShape::ffn_dense, "Inner width of a dense ffn."},
      {"block", &ModelShape::bank_block, "Layers per banked residual stream."},
  };
  return kSizes;
}

std::vector<std::string> shape_names() {
  return {"k3", "k3-neuron", "k3-8l", "k3-16l", "k3-nano", "tiny"};
}

ModelShape named_shape(std::string_view name) {
  if (name == "k3" || name == "k3-full") return real_shape();
  if (name == "k3-neuron") return neuron_shape();
  if (name == "k3-8l") return shallow("k3-8l", 8);
  if (name == "k3-16l") return shallow("k3-16l", 16);
  if (name == "k3-nano") return nano_shape();
  if (name == "tiny") return tiny_shape();
  throw std::invalid_argument("no shape is called " + std::string(name) +
                              "; valid: " + listed(shape_names()));
}

ModelConfig config_of(const ModelShape& s) {
  // The bounds of read_model_config hold for the rest: what is written here must be read there.
  for (const auto& [n, what] : {std::pair{s.n_layer, "layers"},
                                {s.mla_every, "MLA period"},
                                {s.hidden, "hidden width"},
                                {s.n_vocab, "vocabulary"},
                                {s.n_ctx, "context"},
                                {s.n_head, "heads"},
                                {s.kda_head_dim, "KDA head width"},
                                {s.conv_kernel, "convolution kernel"},
                                {s.kv_latent, "kv latent"},
                                {s.rope, "rope width"},
                                {s.value_len, "value length"},
                                {s.n_expert, "experts"},
                                {s.n_expert_used, "experts used"},
                                {s.moe_latent, "MoE latent"},
                                {s.ffn_expert, "expert width"},
                                {s.ffn_dense, "dense width"},
                                {s.bank_block, "residual block"}}) {
    require(n >= 1, s, std::string(what) + " " + std::to_string(n) + ", expected at least 1");
    // Metadata hold 32 bits; more would be written as another number.
    require(n <= kMaxSize, s,
            std::string(what) + " " + std::to_string(n) + ", expected at most " +
                std::to_string(kMaxSize));
  }
  require(
      s.n_layer <= kMaxLayer, s,
      "layers " + std::to_string(s.n_layer) + ", expected at most " + std::to_string(kMaxLayer));
  require(s.q_latent >= 0 && s.n_shared >= 0 && s.n_dense >= 0, s, "a count is negative");
  require(s.ffn_shared >= 0 && s.ffn_shared <= kMaxSize, s, "shared width out of range");
  require(s.ffn_shared == 0 || s.n_shared > 0, s, "a shared width, but no shared experts");
  require(s.n_dense <= s.n_layer, s, "more dense layers than layers");
  require(s.key_len > s.rope, s,
          "key length " + std::to_string(s.key_len) + ", expected more than the rope width " +
              std::to_string(s.rope));
  require(s.n_expert_used <= s.n_expert, s, "more experts used than there are");
  ModelConfig c;
  c.name = s.name;
  c.n_layer = s.n_layer;
  c.hidden = s.hidden;
  c.n_vocab = s.n_vocab;
  c.n_ctx = s.n_ctx;
  c.n_head = s.n_head;
  c.rms_eps = 1e-5f;
  c.kda_head_dim = s.kda_head_dim;
  c.conv_kernel = s.conv_kernel;
  c.gate_lower_bound = -5.0f;
  c.q_latent = s.q_latent;
  c.kv_latent = s.kv_latent;
  c.rope = s.rope;
  c.key_len = s.key_len;
  c.value_len = s.value_len;
  c.n_expert = s.n_expert;
  c.n_expert_used = s.n_expert_used;
  c.moe_latent = s.moe_latent;
  c.n_dense = s.n_dense;
  c.expert_norm = true;
  c.expert_scale = 1.0f;
  c.bank_block = s.bank_block;
  c.situ = {4.0f, 25.0f};
  for (std::int64_t il = 0; il < s.n_layer; ++il) {
    LayerConfig l;
    l.is_mla = il % s.mla_every == s.mla_every - 1 || il == s.n_layer - 1;
    l.has_attn_gate = l.is_mla;
    l.is_dense = il < s.n_dense;
    if (l.is_dense) {
      l.ffn_dense = s.ffn_dense;
    } else {
      l.has_routed_norm = true;
      l.ffn_expert = s.ffn_expert;
      l.ffn_shared = s.ffn_shared > 0 ? s.ffn_shared : s.n_shared * s.ffn_expert;
    }
    c.layers.push_back(l);
  }
  return c;
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> out;
  for (const NamedRecipe& r : kRecipes) out.emplace_back(r.name);
  return out;
}

QuantRecipe QuantRecipe::parse(std::string_view name) {
  QuantRecipe r;
  r.name_ = name;
  for (const NamedRecipe& known : kRecipes) {
    if (name != known.name) continue;
    r.experts_ = known.experts;
    r.other_ = known.other;
    r.vocab_ = known.vocab;
    return r;
  }
  if (const auto type = block_type_from_name(name)) {
    r.experts_ = r.other_ = r.vocab_ = *type;
    return r;
  }
  // experts=T,other=T[,vocab=T], in this order.
  std::string_view rest = name;
  bool more = true;
  const auto next = [&](std::string_view key) -> std::optional<BlockType> {
    if (!more || !rest.starts_with(key)) return std::nullopt;
    const std::size_t comma = rest.find(',');
    const auto type = block_type_from_name(rest.substr(key.size(), comma - key.size()));
    more = comma != std::string_view::npos;
    rest = more ? rest.substr(comma + 1) : "";
    return type;
  };
  const auto experts = next("experts="), other = next("other=");
  const auto vocab = more ? next("vocab=") : other;
  if (!experts || !other || !vocab || more) unknown_recipe(name);
  r.experts_ = *experts;
  r.other_ = *other;
  r.vocab_ = *vocab;
  return r;
}

BlockType QuantRecipe::type_of(Role role, std::int64_t n_in) const {
  if (stays_f32(role)) return BlockType::kF32;
  const bool vocab = role == Role::kTokenEmbd || role == Role::kOutput;
  const BlockType want = is_expert(role) ? experts_ : vocab ? vocab_ : other_;
  if (n_in % traits(want).elems == 0) return want;
  return n_in % traits(BlockType::kQ8_0).elems == 0 ? BlockType::kQ8_0 : BlockType::kF32;
}

ModelOutline outline_of(const ModelShape& shape, const QuantRecipe& recipe) {
  const ModelConfig config = config_of(shape);
  ModelOutline out;
  out.metadata = metadata_entries(config, shape);
  const auto add = [&](Role role, int layer) {
    TensorDecl t;
    t.name = tensor_name(role, layer);
    for (const Axis& a : shape_of(config, role, layer)) t.dims.push_back(a.n);
    const bool vector = t.dims.size() == 1;
    t.type = vector ? BlockType::kF32 : recipe.type_of(role, t.dims[0]);
    if (is_conv(role)) {
      t.dims = {t.dims[0], 1, t.dims[1], 1};  // as converters write it
    }
    out.tensors.push_back(std::move(t));
    out.roles.push_back(role);
  };
  const std::vector<Role> globals = global_roles();
  add(globals.front(), -1);
  for (int il = 0; il < config.n_layer; ++il) {
    for (const Role role : layer_roles(config, il)) add(role, il);
  }
  for (std::size_t i = 1; i < globals.size(); ++i) add(globals[i], -1);
  return out;
}

Metadata metadata_of(const ModelOutline& outline) {
  Metadata m("shape");
  for (const auto& [key, value] : outline.metadata) m.add(key, value);
  return m;
}

std::vector<TensorInfo> tensors_of(const ModelOutline& outline) {
  std::vector<TensorInfo> out;
  for (const TensorDecl& d : outline.tensors) {
    TensorInfo t;
    t.name = d.name;
    t.type = d.type;
    std::copy(d.dims.begin(), d.dims.end(), t.dims.begin());
    t.n_dims = static_cast<int>(d.dims.size());
    t.bytes = d.bytes();
    out.push_back(std::move(t));
  }
  return out;
}

}  // namespace k3
