// plan + source + backend -> Weights, all or nothing.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "rank/plan.h"
#include "rank/weight_source.h"

namespace k3 {

// Bytes read so far and in all, for progress.
using LoadProgressFn = std::function<void(std::uint64_t done, std::uint64_t total)>;

// Device bytes that load_weights() takes on `rank`, before anything is read.
std::uint64_t weight_bytes(const Plan& plan, const WeightSource& source, const Backend& backend,
                           int rank);

// This rank's weights, const once loaded. Matrices keep their block type; vectors (norms, scores, decay, bias, conv) are f32.
class Weights {
 public:
  // Takes exactly this rank's bands. Throws std::invalid_argument naming file and tensor where a vector holds a NaN or an
  // infinity. Adds to `warnings` what had to be put right (a positive ssm_a).
  Weights(const Plan& plan, const WeightSource& source, Backend& backend, int rank,
          const LoadProgressFn& progress, std::vector<std::string>& warnings);

  const Weight& matrix(Role role, int layer = -1) const;
  // The band of a vector on the device; throws std::logic_error if the plan gives this rank none.
  const float* vec(Role role, int layer = -1) const;
  bool has(Role role, int layer = -1) const;
  // q|k|v taps of this rank's heads, [3 * width, conv_kernel].
  const float* conv(int layer) const;

  std::uint64_t device_bytes() const { return device_bytes_; }  // allocated
  std::uint64_t mapped_bytes() const { return mapped_bytes_; }  // used where the file is mapped

 private:
  struct Slot {
    bool present = false;
    Weight matrix;
    const float* vec = nullptr;
  };
  Slot& slot(Role role, int layer);
  const Slot& slot(Role role, int layer) const;
  const float* upload(Backend& backend, const std::vector<float>& values);
  void load_vector(const PlannedTensor& t, const Box& box, const WeightSource& source,
                   Backend& backend, std::vector<std::string>& warnings);
  void load_matrix(const PlannedTensor& t, const Box& box, const WeightSource& source,
                   Backend& backend);
  void load_conv(const Plan& plan, const WeightSource& source, Backend& backend, int rank,
                 int layer);

  std::size_t n_layer_ = 0;
  std::vector<Slot> slots_;  // role-major, (n_layer + 1) each; the last is layer -1
  std::vector<const float*> conv_;
  std::vector<std::unique_ptr<DeviceBuffer>> storage_;
  std::uint64_t device_bytes_ = 0;
  std::uint64_t mapped_bytes_ = 0;
};

}  // namespace k3
