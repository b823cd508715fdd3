// Where a rank's weights come from: the mapped file, or a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "loader/parts.h"
#include "rank/plan.h"

namespace k3 {

// A matrix on its device. mapped_bytes: of the file, where the device reads them in place and nothing was allocated.
struct PlacedWeight {
  Weight weight;
  std::uint64_t mapped_bytes = 0;
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // Elements [begin, end) of a tensor seen as one flat run of rows, as f32. second: of its second source (t.name2).
  virtual std::vector<float> flat(const PlannedTensor& t, bool second, std::int64_t begin,
                                  std::int64_t end) const = 0;
  // Brings a band (not empty) to the device; `storage` receives the memory that must outlive the weight, if any.
  virtual PlacedWeight place(const PlannedTensor& t, const Box& box, Backend& backend,
                             std::vector<std::unique_ptr<DeviceBuffer>>& storage) const = 0;
  // Device bytes that place() will take.
  virtual std::size_t placed_bytes(const PlannedTensor& t, const Box& box,
                                   const Backend& backend) const = 0;
  // The beginning of an error about a tensor.
  virtual std::string where(const PlannedTensor& t, bool second) const = 0;
};

class FileWeights final : public WeightSource {
 public:
  // `file` must outlive this object, and the weights that are read in place.
  explicit FileWeights(const ModelFile& file) : file_(file) {}

  std::vector<float> flat(const PlannedTensor& t, bool second, std::int64_t begin,
                          std::int64_t end) const override;
  PlacedWeight place(const PlannedTensor& t, const Box& box, Backend& backend,
                     std::vector<std::unique_ptr<DeviceBuffer>>& storage) const override;
  std::size_t placed_bytes(const PlannedTensor& t, const Box& box,
                           const Backend& backend) const override;
  std::string where(const PlannedTensor& t, bool second) const override;

 private:
  const TensorInfo& stored(const PlannedTensor& t, bool second) const;

  const ModelFile& file_;
};

// The weights that k3synth would write for the same tensors and seed, made where they are needed: matrices on the device.
class SyntheticWeights final : public WeightSource {
 public:
  explicit SyntheticWeights(std::uint64_t seed) : seed_(seed) {}

  std::vector<float> flat(const PlannedTensor& t, bool second, std::int64_t begin,
                          std::int64_t end) const override;
  PlacedWeight place(const PlannedTensor& t, const Box& box, Backend& backend,
                     std::vector<std::unique_ptr<DeviceBuffer>>& storage) const override;
  std::size_t placed_bytes(const PlannedTensor& t, const Box& box,
                           const Backend& backend) const override;
  std::string where(const PlannedTensor& t, bool second) const override;

 private:
  std::uint64_t seed_;
};

}  // namespace k3
