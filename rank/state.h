// What a sequence remembers: KDA state and conv window, MLA latent cache. This rank's layers and heads, all slots.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "rank/plan.h"

namespace k3 {

struct StateShape {
  int n_slot = 1;
  std::int64_t n_ctx = 0;  // positions per slot
  CacheType cache = CacheType::kF32;
};

// The positions whose rows `rank` keeps.
RowShard row_shard(const Layout& layout, int rank);

// Device bytes that State takes on `rank`: what a context costs, before anything is allocated.
std::uint64_t state_bytes(const Plan& plan, int rank, const StateShape& shape);
// Of these, the bytes that grow with n_ctx, per position; where rows are cut, the rank's share of them.
std::uint64_t state_bytes_per_position(const Plan& plan, int rank, const StateShape& shape);

class State {
 public:
  State(Backend& backend, const Plan& plan, int rank, const StateShape& shape);

  const KdaState& kda(int layer) const { return kda_[index(layer)]; }
  const MlaCache& mla(int layer) const { return mla_[index(layer)]; }
  // Fills what a sequence of `length` positions would have left in the slot with seeded random values of sane size: for
  // benchmarks at depth, where only the amount of data matters. Values differ between layers, repeat within one.
  void fabricate(Backend& backend, int slot, std::int64_t length, std::uint64_t seed);

  // Zeros in all of a slot: nothing of a sequence that held a NaN must be met again, not even where it is not read.
  void clear(Backend& backend, int slot);

  // What a sequence of `length` positions has left in a slot, this rank's part: to another slot, to host bytes and back. Of
  // the latent cache only the rows in use are moved. restore() takes what save() of a State of the same plan, rank and cache
  // type gave, for any slot, and throws std::invalid_argument where the size is another.
  void fork(Backend& backend, int from, int to, std::int64_t length);
  std::vector<std::byte> save(Backend& backend, int slot, std::int64_t length) const;
  void restore(Backend& backend, int slot, std::int64_t length, std::span<const std::byte> bytes);

  // One layer of such a sequence, head by head, [s | window] each, and of MLA the rows that this rank keeps: what does not
  // depend on how heads are cut. head_bytes() and row_bytes(): of one of them.
  std::size_t head_bytes(int layer) const;
  std::size_t row_bytes(int layer) const;
  std::vector<std::byte> save_heads(Backend& backend, int slot, int layer) const;
  void restore_heads(Backend& backend, int slot, int layer, std::span<const std::byte> blob);
  std::vector<std::byte> save_rows(Backend& backend, int slot, int layer,
                                   std::int64_t length) const;
  void restore_rows(Backend& backend, int slot, int layer, std::int64_t length,
                    std::span<const std::byte> rows);

  const StateShape& shape() const { return shape_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  // Calls f(device memory, bytes) for every run of bytes that such a sequence owns, in a fixed order.
  template <class F>
  void each_part(int slot, std::int64_t length, const F& f) const;
  std::size_t index(int layer) const { return static_cast<std::size_t>(layer - first_layer_); }

  StateShape shape_;
  int first_layer_ = 0;
  std::uint64_t bytes_ = 0;
  std::vector<KdaState> kda_;  // by layer of this stage; empty entries for the other kind
  std::vector<MlaCache> mla_;
  std::vector<std::unique_ptr<DeviceBuffer>> storage_;
};

}  // namespace k3
