// A synthetic f32 model whose values a test may overwrite.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include "loader/parts.h"
#include "rank/shapes.h"
#include "rank/synth.h"

namespace k3 {

// A synthetic model in a folder that goes with the test.
class PokedModel {
 public:
  explicit PokedModel(const ModelShape& shape)
      : dir_(std::filesystem::temp_directory_path() / ("k3_poked_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(dir_);
    SynthOptions o;
    o.shape = shape;
    o.recipe = QuantRecipe::parse("F32");
    path_ = write_synthetic((dir_ / "model.gguf").string(), o).front();
  }
  ~PokedModel() {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  const std::string& path() const { return path_; }

  // Overwrites element i of an f32 tensor.
  void poke(const std::string& tensor, std::int64_t i, float value) const {
    const ModelFile file = ModelFile::open(path_);
    const TensorInfo* t = file.find(tensor);
    if (t == nullptr) throw std::logic_error("no tensor " + tensor);
    std::fstream out(path_, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(t->offset) + i * 4);
    out.write(reinterpret_cast<const char*>(&value), sizeof value);
  }

 private:
  std::filesystem::path dir_;
  std::string path_;
};

}  // namespace k3
