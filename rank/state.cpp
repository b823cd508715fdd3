#include "rank/state.h"

namespace k3 {
namespace {

std::uint64_t cache_elem_bytes(CacheType type) { return type == CacheType::kF32 ? 4 : 2; }

struct LayerBytes {
  std::uint64_t s = 0, window = 0, rows = 0;
};

LayerBytes layer_bytes(const Plan& plan, int rank, int layer, const StateShape& shape) {
  const ModelConfig& c = plan.config();
  LayerBytes b;
  const auto slots = static_cast<std::uint64_t>(shape.n_slot);
  if (c.layers[static_cast<std::size_t>(layer)].is_mla) {
    b.rows = slots * static_cast<std::uint64_t>(shape.n_ctx * c.cache_row()) *
             cache_elem_bytes(shape.cache);
  } else {
    const std::int64_t heads = plan.heads(rank, layer).size();
    b.s =
        slots * static_cast<std::uint64_t>(heads * c.kda_head_dim * c.kda_head_dim) * sizeof(float);
    b.window = slots *
               static_cast<std::uint64_t>((c.conv_kernel - 1) * 3 * heads * c.kda_head_dim) *
               sizeof(float);
  }
  return b;
}

}  // namespace

std::uint64_t state_bytes(const Plan& plan, int rank, const StateShape& shape) {
  std::uint64_t sum = 0;
  const Band layers = plan.layers(rank);
  for (auto il = static_cast<int>(layers.begin); il < layers.end; ++il) {
    const LayerBytes b = layer_bytes(plan, rank, il, shape);
    sum += b.s + b.window + b.rows;
  }
  return sum;
}

std::uint64_t state_bytes_per_position(const Plan& plan, int rank, const StateShape& shape) {
  StateShape one = shape;
  one.n_ctx = 1;
  StateShape none = shape;
  none.n_ctx = 0;
  return state_bytes(plan, rank, one) - state_bytes(plan, rank, none);
}

State::State(Backend& backend, const Plan& plan, int rank, const StateShape& shape)
    : shape_(shape) {
  const ModelConfig& c = plan.config();
  const Band layers = plan.layers(rank);
  first_layer_ = static_cast<int>(layers.begin);
  auto take = [&](std::uint64_t bytes) {
    storage_.push_back(backend.allocate(bytes));
    bytes_ += bytes;
    return storage_.back()->data();
  };
  for (auto il = static_cast<int>(layers.begin); il < layers.end; ++il) {
    const LayerBytes b = layer_bytes(plan, rank, il, shape);
    KdaState kda;
    MlaCache mla;
    if (c.layers[static_cast<std::size_t>(il)].is_mla) {
      mla.rows = take(b.rows);
      mla.type = shape.cache;
      mla.n_ctx = shape.n_ctx;
      mla.kv_latent = c.kv_latent;
      mla.rope = c.rope;
    } else {
      kda.s = reinterpret_cast<float*>(take(b.s));
      kda.window = reinterpret_cast<float*>(take(b.window));
      kda.n_head = plan.heads(rank, il).size();
      kda.head_dim = c.kda_head_dim;
      kda.conv_kernel = c.conv_kernel;
    }
    kda_.push_back(kda);
    mla_.push_back(mla);
  }
}

}  // namespace k3
