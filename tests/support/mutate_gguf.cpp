// Writes a GGUF that is wrong in one chosen way, from a good one of a single part; for tests of the programs.
//   mutate_gguf IN OUT drop-key KEY | set-string KEY TEXT | set-u32 KEY N | drop-tensor NAME | add-tensor NAME |
//                      swap-dims NAME | nan NAME | reverse NAME (an F32 tensor's values, last one first)
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "loader/gguf_writer.h"
#include "loader/parts.h"

namespace {

struct Model {
  k3::ModelFile file;
  k3::MetadataEntries metadata;
  std::vector<k3::TensorDecl> decls;
  std::vector<std::vector<std::byte>> data;

  explicit Model(const std::string& path) : file(k3::ModelFile::open(path)) {
    for (const auto& entry : file.metadata().entries()) metadata.push_back(entry);
    for (const k3::TensorInfo& t : file.tensors()) {
      decls.push_back({t.name, t.type, {t.dims.begin(), t.dims.begin() + t.n_dims}});
      data.emplace_back(file.data(t), file.data(t) + t.bytes);
    }
  }
  std::size_t tensor(const std::string& name) const {
    for (std::size_t i = 0; i < decls.size(); ++i) {
      if (decls[i].name == name) return i;
    }
    throw std::invalid_argument("no tensor " + name);
  }
  k3::Value& value(const std::string& key) {
    for (auto& [name, value] : metadata) {
      if (name == key) return value;
    }
    throw std::invalid_argument("no key " + key);
  }
  void write(const std::string& path) const {
    k3::write_gguf(path, metadata, decls, {},
                   [&](std::size_t i, const k3::TensorDecl&, const k3::Put& put) { put(data[i]); });
  }
};

void change(Model& m, const std::string& how, const std::string& name, const std::string& to) {
  if (how == "drop-key") {
    m.value(name);  // must be there
    std::erase_if(m.metadata, [&](const auto& entry) { return entry.first == name; });
  } else if (how == "set-string") {
    m.value(name) = k3::Value(to);
  } else if (how == "set-u32") {
    m.value(name) = k3::Value(static_cast<std::uint32_t>(std::stoul(to)));
  } else if (how == "drop-tensor") {
    const auto i = static_cast<std::ptrdiff_t>(m.tensor(name));
    m.decls.erase(m.decls.begin() + i);
    m.data.erase(m.data.begin() + i);
  } else if (how == "add-tensor") {
    m.decls.push_back({name, k3::BlockType::kF32, {4}});
    m.data.emplace_back(16);
  } else if (how == "swap-dims") {
    k3::TensorDecl& t = m.decls[m.tensor(name)];
    std::swap(t.dims.at(0), t.dims.at(1));
  } else if (how == "nan") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(m.data[m.tensor(name)].data(), &nan, sizeof nan);
  } else if (how == "reverse") {
    std::vector<std::byte>& bytes = m.data[m.tensor(name)];
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    std::reverse(values.begin(), values.end());
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else {
    throw std::invalid_argument("no such change: " + how);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 5) throw std::invalid_argument("usage: mutate_gguf IN OUT CHANGE NAME [VALUE]");
    Model model(argv[1]);
    change(model, argv[3], argv[4], argc > 5 ? argv[5] : "");
    model.write(argv[2]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mutate_gguf: %s\n", e.what());
    return 2;
  }
}
