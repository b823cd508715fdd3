// Names and shapes of a K3 model's tensors, and the dialects in which files spell them.
// Source of both: the tensor list of the reference converter; dialects as met in published files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "loader/gguf.h"
#include "rank/config.h"
#include "rank/plan.h"

namespace k3 {

// One axis of a shape: its length, and the keys it follows from, for errors.
struct Axis {
  std::int64_t n = 0;
  const char* what = "";
};

// Logical shape, fastest axis first: one axis for vectors, two for matrices, three for stacks of matrices.
using Shape = std::vector<Axis>;

// The file's name of a role: "token_embd.weight", "blk.3.ssm_a".
std::string tensor_name(Role role, int layer);

// Roles a model of this configuration has outside its layers, and in layer `layer`; in the order of the forward pass.
std::vector<Role> global_roles();
std::vector<Role> layer_roles(const ModelConfig& config, int layer);

Shape shape_of(const ModelConfig& config, Role role, int layer);

Cut cut_of(Role role, ShardPolicy policy);

// A tensor found under its own name or a dialect's.
struct FoundTensor {
  const TensorInfo* tensor = nullptr;
  const TensorInfo* second = nullptr;  // of a product of two
  const char* dialect = nullptr;       // what to tell the user; null under the standard name
  explicit operator bool() const { return tensor != nullptr; }
};

// A file's tensors by name. Keeps pointers into `tensors`.
class TensorIndex {
 public:
  // Throws std::invalid_argument when two tensors have the same name.
  TensorIndex(const std::vector<TensorInfo>& tensors, const std::string& file);
  const TensorInfo* find(std::string_view name) const;
  FoundTensor find(Role role, int layer) const;

 private:
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;
};

}  // namespace k3
