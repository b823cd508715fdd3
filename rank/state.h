// What a sequence remembers: KDA state and conv window, MLA latent cache. This rank's layers and heads, all slots.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "rank/plan.h"

namespace k3 {

struct StateShape {
  int n_slot = 1;
  std::int64_t n_ctx = 0;  // positions per slot
  CacheType cache = CacheType::kF32;
};

// Device bytes that State takes on `rank`: what a context costs, before anything is allocated.
std::uint64_t state_bytes(const Plan& plan, int rank, const StateShape& shape);
// Of these, the bytes that grow with n_ctx, per position.
std::uint64_t state_bytes_per_position(const Plan& plan, int rank, const StateShape& shape);

class State {
 public:
  State(Backend& backend, const Plan& plan, int rank, const StateShape& shape);

  const KdaState& kda(int layer) const { return kda_[index(layer)]; }
  const MlaCache& mla(int layer) const { return mla_[index(layer)]; }
  // Fills what a sequence of `length` positions would have left in the slot with seeded random values of sane size: for
  // benchmarks at depth, where only the amount of data matters. Values differ between layers, repeat within one.
  void fabricate(Backend& backend, int slot, std::int64_t length, std::uint64_t seed);

  const StateShape& shape() const { return shape_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::size_t index(int layer) const { return static_cast<std::size_t>(layer - first_layer_); }

  StateShape shape_;
  int first_layer_ = 0;
  std::uint64_t bytes_ = 0;
  std::vector<KdaState> kda_;  // by layer of this stage; empty entries for the other kind
  std::vector<MlaCache> mla_;
  std::vector<std::unique_ptr<DeviceBuffer>> storage_;
};

}  // namespace k3
