#include "rank/state.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>

#include "kernels/half.h"

namespace k3 {
namespace {

std::uint64_t cache_elem_bytes(CacheType type) { return type == CacheType::kF32 ? 4 : 2; }

// Rows of a slot that a rank keeps: as many as the one that keeps most, so that all ranks have the same room.
std::int64_t rows_kept(const Layout& layout, std::int64_t n_ctx) {
  return row_shard(layout, 0).rows(n_ctx);
}

struct LayerBytes {
  std::uint64_t s = 0, window = 0, rows = 0;
};

LayerBytes layer_bytes(const Plan& plan, int rank, int layer, const StateShape& shape) {
  const ModelConfig& c = plan.config();
  LayerBytes b;
  const auto slots = static_cast<std::uint64_t>(shape.n_slot);
  if (c.layers[static_cast<std::size_t>(layer)].is_mla) {
    b.rows = slots *
             static_cast<std::uint64_t>(rows_kept(plan.layout(), shape.n_ctx) * c.cache_row()) *
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

RowShard row_shard(const Layout& layout, int rank) {
  RowShard s;
  if (!layout.cuts_rows()) return s;
  s.part = layout.tp_rank(rank);
  s.n_part = layout.tp;
  return s;
}

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
  const RowShard shard = row_shard(plan.layout(), rank);
  StateShape round = shape, none = shape;
  round.n_ctx = shard.n_part == 1 ? 1 : shard.n_part * shard.block;
  none.n_ctx = 0;
  return (state_bytes(plan, rank, round) - state_bytes(plan, rank, none)) /
         static_cast<std::uint64_t>(round.n_ctx);
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
      mla.n_ctx = rows_kept(plan.layout(), shape.n_ctx);
      mla.shard = row_shard(plan.layout(), rank);
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

template <class F>
void State::each_part(int slot, std::int64_t length, const F& f) const {
  const auto bytes_of = [](std::int64_t count, std::uint64_t each) {
    return static_cast<std::size_t>(count) * static_cast<std::size_t>(each);
  };
  for (std::size_t i = 0; i < kda_.size(); ++i) {
    if (const MlaCache& c = mla_[i]; c.rows != nullptr) {
      const std::size_t row = bytes_of(c.kv_latent + c.rope, cache_elem_bytes(c.type));
      f(c.rows + static_cast<std::size_t>(slot * c.n_ctx) * row,
        static_cast<std::size_t>(c.shard.rows(length)) * row);
      continue;
    }
    const KdaState& k = kda_[i];
    const std::int64_t s = k.n_head * k.head_dim * k.head_dim;
    const std::int64_t window = (k.conv_kernel - 1) * 3 * k.n_head * k.head_dim;
    f(reinterpret_cast<std::byte*>(k.s + slot * s), bytes_of(s, sizeof(float)));
    f(reinterpret_cast<std::byte*>(k.window + slot * window), bytes_of(window, sizeof(float)));
  }
}

void State::clear(Backend& backend, int slot) {
  each_part(slot, shape_.n_ctx, [&](std::byte* p, std::size_t bytes) { backend.zero(p, bytes); });
}

void State::fork(Backend& backend, int from, int to, std::int64_t length) {
  std::vector<std::byte*> targets;
  each_part(to, length, [&](std::byte* p, std::size_t) { targets.push_back(p); });
  std::size_t i = 0;
  each_part(from, length,
            [&](std::byte* p, std::size_t bytes) { backend.copy(targets[i++], p, bytes); });
}

std::vector<std::byte> State::save(Backend& backend, int slot, std::int64_t length) const {
  std::size_t total = 0;
  each_part(slot, length, [&](std::byte*, std::size_t bytes) { total += bytes; });
  std::vector<std::byte> out(total);
  std::size_t at = 0;
  each_part(slot, length, [&](std::byte* p, std::size_t bytes) {
    backend.download(out.data() + at, p, bytes);
    at += bytes;
  });
  return out;
}

void State::restore(Backend& backend, int slot, std::int64_t length,
                    std::span<const std::byte> bytes) {
  std::size_t total = 0;
  each_part(slot, length, [&](std::byte*, std::size_t n) { total += n; });
  if (total != bytes.size()) {
    throw std::invalid_argument("saved state of " + std::to_string(bytes.size()) +
                                " bytes, expected " + std::to_string(total));
  }
  std::size_t at = 0;
  each_part(slot, length, [&](std::byte* p, std::size_t n) {
    backend.upload(p, bytes.data() + at, n);
    at += n;
  });
}

std::size_t State::head_bytes(int layer) const {
  const KdaState& k = kda(layer);
  return static_cast<std::size_t>(k.head_dim * (k.head_dim + 3 * (k.conv_kernel - 1))) *
         sizeof(float);
}

std::size_t State::row_bytes(int layer) const {
  const MlaCache& c = mla(layer);
  return static_cast<std::size_t>(c.kv_latent + c.rope) *
         static_cast<std::size_t>(cache_elem_bytes(c.type));
}

namespace {

// The window of a slot is [tap][q k v][head][head_dim]; a head's blob has [tap][q k v][head_dim]. f(window index, blob index) for
// every run of head_dim values.
template <class F>
void each_window_run(const KdaState& k, std::int64_t head, const F& f) {
  for (std::int64_t run = 0; run < 3 * (k.conv_kernel - 1); ++run)
    f(static_cast<std::size_t>((run * k.n_head + head) * k.head_dim),
      static_cast<std::size_t>(run * k.head_dim));
}

struct HeadSizes {
  std::size_t s, window;  // of all heads, values
};
HeadSizes head_sizes(const KdaState& k) {
  return {static_cast<std::size_t>(k.n_head * k.head_dim * k.head_dim),
          static_cast<std::size_t>((k.conv_kernel - 1) * 3 * k.n_head * k.head_dim)};
}

}  // namespace

std::vector<std::byte> State::save_heads(Backend& backend, int slot, int layer) const {
  const KdaState& k = kda(layer);
  const HeadSizes n = head_sizes(k);
  std::vector<float> s(n.s), window(n.window);
  backend.download(s.data(), k.s + static_cast<std::size_t>(slot) * n.s, n.s * sizeof(float));
  backend.download(window.data(), k.window + static_cast<std::size_t>(slot) * n.window,
                   n.window * sizeof(float));
  const auto s_head = static_cast<std::size_t>(k.head_dim * k.head_dim);
  const auto run = static_cast<std::size_t>(k.head_dim);
  std::vector<std::byte> blob(head_bytes(layer) * static_cast<std::size_t>(k.n_head));
  auto* out = reinterpret_cast<float*>(blob.data());
  for (std::int64_t h = 0; h < k.n_head; ++h, out += head_bytes(layer) / sizeof(float)) {
    std::copy_n(s.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(h) * s_head),
                s_head, out);
    each_window_run(k, h, [&](std::size_t from, std::size_t to) {
      std::copy_n(window.begin() + static_cast<std::ptrdiff_t>(from), run, out + s_head + to);
    });
  }
  return blob;
}

void State::restore_heads(Backend& backend, int slot, int layer, std::span<const std::byte> blob) {
  const KdaState& k = kda(layer);
  const HeadSizes n = head_sizes(k);
  if (blob.size() != head_bytes(layer) * static_cast<std::size_t>(k.n_head))
    throw std::invalid_argument("heads of another size or number");
  std::vector<float> s(n.s), window(n.window);
  const auto s_head = static_cast<std::size_t>(k.head_dim * k.head_dim);
  const auto run = static_cast<std::size_t>(k.head_dim);
  const auto* in = reinterpret_cast<const float*>(blob.data());
  for (std::int64_t h = 0; h < k.n_head; ++h, in += head_bytes(layer) / sizeof(float)) {
    std::copy_n(in, s_head,
                s.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(h) * s_head));
    each_window_run(k, h, [&](std::size_t to, std::size_t from) {
      std::copy_n(in + s_head + from, run, window.begin() + static_cast<std::ptrdiff_t>(to));
    });
  }
  backend.upload(k.s + static_cast<std::size_t>(slot) * n.s, s.data(), n.s * sizeof(float));
  backend.upload(k.window + static_cast<std::size_t>(slot) * n.window, window.data(),
                 n.window * sizeof(float));
}

std::vector<std::byte> State::save_rows(Backend& backend, int slot, int layer,
                                        std::int64_t length) const {
  const MlaCache& c = mla(layer);
  std::vector<std::byte> rows(row_bytes(layer) * static_cast<std::size_t>(c.shard.rows(length)));
  backend.download(rows.data(),
                   c.rows + static_cast<std::size_t>(slot * c.n_ctx) * row_bytes(layer),
                   rows.size());
  return rows;
}

void State::restore_rows(Backend& backend, int slot, int layer, std::int64_t length,
                         std::span<const std::byte> rows) {
  const MlaCache& c = mla(layer);
  if (rows.size() != row_bytes(layer) * static_cast<std::size_t>(c.shard.rows(length)))
    throw std::invalid_argument("cache rows of another size or number");
  backend.upload(c.rows + static_cast<std::size_t>(slot * c.n_ctx) * row_bytes(layer), rows.data(),
                 rows.size());
}

namespace {

// `count` values of about unit size, times scale, as the cache stores them.
std::vector<std::byte> random_elements(std::int64_t count, CacheType type, float scale,
                                       std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0.0f, scale);
  const std::size_t each = cache_elem_bytes(type);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * each);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const float v = normal(rng);
    const std::uint16_t h = type == CacheType::kF16 ? float_to_half(v) : float_to_bf16(v);
    std::copy_n(type == CacheType::kF32 ? reinterpret_cast<const std::byte*>(&v)
                                        : reinterpret_cast<const std::byte*>(&h),
                each, bytes.begin() + static_cast<std::ptrdiff_t>(i * each));
  }
  return bytes;
}

}  // namespace

void State::fabricate(Backend& backend, int slot, std::int64_t length, std::uint64_t seed) {
  constexpr std::int64_t kPatternRows = 1024;  // repeated: a long context costs one pattern
  for (std::size_t i = 0; i < kda_.size(); ++i) {
    std::mt19937_64 rng(seed * 1000003 + i);
    if (mla_[i].rows != nullptr) {
      const MlaCache& c = mla_[i];
      const std::int64_t width = c.kv_latent + c.rope;
      const std::int64_t row = width * static_cast<std::int64_t>(cache_elem_bytes(c.type));
      const std::vector<std::byte> pattern =
          random_elements(std::min(kPatternRows, length) * width, c.type, 1.0f, rng);
      const std::int64_t kept = c.shard.rows(length);
      for (std::int64_t at = 0; at < kept; at += kPatternRows) {
        const std::int64_t n = std::min(kPatternRows, kept - at);
        backend.upload(c.rows + (slot * c.n_ctx + at) * row, pattern.data(),
                       static_cast<std::size_t>(n * row));
      }
      continue;
    }
    const KdaState& k = kda_[i];
    const std::int64_t s = k.n_head * k.head_dim * k.head_dim;
    const std::int64_t window = (k.conv_kernel - 1) * 3 * k.n_head * k.head_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(k.head_dim));
    const std::vector<std::byte> state = random_elements(s, CacheType::kF32, scale, rng);
    const std::vector<std::byte> inputs = random_elements(window, CacheType::kF32, 1.0f, rng);
    backend.upload(k.s + slot * s, state.data(), state.size());
    backend.upload(k.window + slot * window, inputs.data(), inputs.size());
  }
  backend.synchronize();
}

}  // namespace k3
