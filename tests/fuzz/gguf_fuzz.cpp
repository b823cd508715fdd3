// The GGUF reader on arbitrary bytes: it may refuse them in one line or read them; then what it says must hold.
// The corpus: gguf_corpus/ (every value type, nested arrays, several tensors) and headers of the fixtures.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <span>
#include <stdexcept>
#include <string>

#include "loader/gguf.h"
#include "loader/source.h"

namespace {

// A failed promise must stop every build of this target, also one without sanitizers.
void require(bool holds, const char* promise) {
  if (holds) return;
  std::cerr << "broken promise: " << promise << "\n";
  std::abort();
}

void check_tensors(const k3::GgufHeader& h, std::span<const std::byte> bytes, bool header_only) {
  for (const k3::TensorInfo& t : h.tensors) {
    require(t.bytes > 0 && t.n_elem() > 0, "no tensor is empty");
    require(t.bytes == k3::block_bytes(t.type, static_cast<std::uint64_t>(t.n_elem())),
            "the size of a tensor is that of its blocks");
    require(t.offset >= h.data_begin && t.offset % h.alignment == 0, "tensors are aligned");
    require(!t.shape().empty() && !t.name.empty(), "tensors have a name and a shape");
    if (!header_only) {
      require(t.offset < bytes.size() && t.bytes <= bytes.size() - t.offset,
              "tensors are inside the file");
    }
  }
}

// The accessors too see what the file says.
void use_metadata(const k3::Metadata& m) {
  for (const auto& [key, value] : m.entries()) {
    require(m.find(key) == &value, "every key is found");
    require(value.describe().find('\n') == std::string::npos, "a description is one line");
    try {
      if (value.is_array()) {
        m.get_array<std::int32_t>(key);
      } else {
        m.get<std::int32_t>(key);
        m.get<float>(key);
      }
    } catch (const std::invalid_argument&) {
      // another kind of value
    }
  }
}

void read(std::span<const std::byte> bytes, bool header_only) {
  try {
    const k3::GgufHeader h = k3::read_gguf(k3::MemorySource(bytes), {0, header_only});
    check_tensors(h, bytes, header_only);
    use_metadata(h.metadata);
  } catch (const std::invalid_argument& e) {
    const std::string line = e.what();
    require(line.starts_with("memory: "), "an error names the file");
    require(line.find('\n') == std::string::npos, "an error is one line");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  read(bytes, false);
  read(bytes, true);
  return 0;
}
