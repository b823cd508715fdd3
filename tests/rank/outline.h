// A model's header as plain lists that a test may damage.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "rank/plan.h"
#include "rank/shapes.h"

namespace k3::test {

struct Outline {
  MetadataEntries metadata;
  std::vector<TensorInfo> tensors;
  std::vector<std::string> dialects;  // of keys, filled by config()

  Outline(const ModelShape& shape, const std::string& quant) {
    const ModelOutline o = outline_of(shape, QuantRecipe::parse(quant));
    metadata = o.metadata;
    tensors = tensors_of(o);
  }
  explicit Outline(const std::string& shape, const std::string& quant = "UD-IQ1_S")
      : Outline(named_shape(shape), quant) {}

  void remove_key(const std::string& key) {
    std::erase_if(metadata, [&](const auto& e) { return e.first == key; });
  }
  void set_key(const std::string& key, Value value) {
    remove_key(key);
    metadata.emplace_back(key, std::move(value));
  }
  void rename_key(const std::string& key, const std::string& to) {
    for (auto& e : metadata) {
      if (e.first == key) e.first = to;
    }
  }
  TensorInfo& tensor(const std::string& name) {
    const auto it = std::find_if(tensors.begin(), tensors.end(),
                                 [&](const TensorInfo& t) { return t.name == name; });
    if (it == tensors.end()) throw std::logic_error("no tensor " + name);
    return *it;
  }
  void remove_tensor(const std::string& name) {
    std::erase_if(tensors, [&](const TensorInfo& t) { return t.name == name; });
  }
  // Every tensor whose name ends so gets another end.
  void rename_all(const std::string& end, const std::string& to) {
    for (TensorInfo& t : tensors) {
      if (t.name.ends_with(end)) t.name = t.name.substr(0, t.name.size() - end.size()) + to;
    }
  }
  void add(const std::string& name, std::vector<std::int64_t> dims,
           BlockType type = BlockType::kF32) {
    TensorInfo t;
    t.name = name;
    t.type = type;
    t.n_dims = static_cast<int>(dims.size());
    std::copy(dims.begin(), dims.end(), t.dims.begin());
    tensors.push_back(std::move(t));
  }

  ModelConfig config() {
    Metadata m("m.gguf");
    for (const auto& [key, value] : metadata) m.add(key, value);
    return read_model_config(m, tensors, "m.gguf", dialects);
  }
  Plan plan(const Layout& layout = {}) { return Plan::make(config(), tensors, layout, "m.gguf"); }
};

// The line of the std::invalid_argument that `f` throws; empty when it does not.
template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline bool has(const std::vector<std::string>& lines, const std::string& part) {
  return std::any_of(lines.begin(), lines.end(), [&](const auto& l) { return has(l, part); });
}

}  // namespace k3::test
