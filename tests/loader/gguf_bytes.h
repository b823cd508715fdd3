// GGUF files built field by field, so that any field can lie; and what a reader says about them.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "loader/gguf.h"

namespace k3::test {

class GgufBytes {
 public:
  std::vector<std::byte> bytes;

  GgufBytes& raw(const void* data, std::size_t n) {
    const std::byte* from = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), from, from + n);
    return *this;
  }
  template <class T>
  GgufBytes& number(T v) {
    return raw(&v, sizeof v);
  }
  GgufBytes& u32(std::uint32_t v) { return number(v); }
  GgufBytes& u64(std::uint64_t v) { return number(v); }
  GgufBytes& text(std::string_view s) { return u64(s.size()).raw(s.data(), s.size()); }

  GgufBytes& header(std::uint64_t n_tensors, std::uint64_t n_keys, std::uint32_t version = 3) {
    return raw("GGUF", 4).u32(version).u64(n_tensors).u64(n_keys);
  }
  GgufBytes& key(std::string_view name, ValueType type) {
    return text(name).u32(static_cast<std::uint32_t>(type));
  }
  GgufBytes& array(ValueType element, std::uint64_t count) {
    return u32(static_cast<std::uint32_t>(element)).u64(count);
  }
  GgufBytes& tensor(std::string_view name, std::initializer_list<std::uint64_t> dims,
                    std::uint32_t type, std::uint64_t offset) {
    text(name).u32(static_cast<std::uint32_t>(dims.size()));
    for (const std::uint64_t d : dims) u64(d);
    return u32(type).u64(offset);
  }
  GgufBytes& pad(std::size_t alignment = 32) {
    bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
    return *this;
  }
  GgufBytes& data(std::size_t n) {
    bytes.resize(bytes.size() + n);
    return *this;
  }
  // One F32 tensor of 8 elements with its data: valid.
  static GgufBytes good() {
    GgufBytes b;
    return b.header(1, 0).tensor("t", {8}, 0, 0).pad().data(32);
  }
};

// The message of what f() throws, which must be bad input told in one line; "" when it throws nothing.
template <class F>
std::string refusal_of(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    const std::string line = e.what();
    CHECK(line.find('\n') == std::string::npos);
    return line;
  }
  return "";
}

inline std::string refusal(const GgufBytes& b, GgufReadOptions options = {}) {
  const MemorySource source(b.bytes, "bad.gguf");
  return refusal_of([&] { read_gguf(source, options); });
}

inline bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

inline std::vector<std::byte> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), path);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::byte> bytes(chars.size());
  if (!bytes.empty()) std::memcpy(bytes.data(), chars.data(), chars.size());
  return bytes;
}

inline void write_bytes(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  REQUIRE_MESSAGE(out.good(), path);
}

// A folder of the test's own that goes with it.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "k3-loader-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace k3::test
