#include "loader/gguf_writer.h"

#include <limits>
#include <stdexcept>
#include <string_view>

#include "loader/atomic_file.h"
#include "loader/parts.h"

namespace k3 {
namespace {

constexpr std::uint64_t kDefaultAlignment = 32;
constexpr const char* kAlignmentKey = "general.alignment";

std::uint64_t round_up(std::uint64_t n, std::uint64_t to) { return (n + to - 1) / to * to; }

// Appends little-endian fields. The machines this runs on are little-endian, as the reader assumes too.
class Bytes {
 public:
  void raw(const void* data, std::size_t n) {
    const std::byte* from = static_cast<const std::byte*>(data);
    out.insert(out.end(), from, from + n);
  }
  template <class T>
  void number(T v) {
    raw(&v, sizeof v);
  }
  void string(std::string_view s) {
    number<std::uint64_t>(s.size());
    raw(s.data(), s.size());
  }
  void type(ValueType t) { number(static_cast<std::uint32_t>(t)); }
  std::vector<std::byte> out;
};

void put(Bytes& to, bool v) { to.number<std::uint8_t>(v ? 1 : 0); }
void put(Bytes& to, const std::string& v) { to.string(v); }
template <class T>
requires std::is_arithmetic_v<T>
void put(Bytes& to, T v) { to.number(v); }
template <class T>
void put(Bytes& to, const std::vector<T>& items) {
  to.number<std::uint64_t>(items.size());
  for (const T& item : items) put(to, item);
}
void put(Bytes& to, const BoolArray& v) { put(to, v.items); }
void put(Bytes& to, const NestedArray& v);

// What follows a value's type id: of an array, the element type, the count and the elements.
void put_payload(Bytes& to, const Value& v) {
  if (v.is_array()) to.type(v.element_type());
  std::visit([&](const auto& held) { put(to, held); }, v.data);
}

void put(Bytes& to, const NestedArray& v) {
  to.number<std::uint64_t>(v.items.size());
  for (const Value& item : v.items) {
    if (!item.is_array()) throw std::invalid_argument("a nested array holds a " + item.describe());
    put_payload(to, item);
  }
}

void check_alignment(const MetadataEntries& metadata, std::uint64_t alignment) {
  if (alignment == 0 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0) {
    throw std::invalid_argument("alignment " + std::to_string(alignment) +
                                ", expected a power of two up to " + std::to_string(kMaxAlignment));
  }
  for (const auto& [key, value] : metadata) {
    if (key == kAlignmentKey) {
      throw std::invalid_argument(std::string(kAlignmentKey) +
                                  " follows from the alignment asked for, and is not to be stated");
    }
  }
}

struct PartPlan {
  std::size_t begin = 0;  // tensors [begin, end)
  std::size_t end = 0;
};

// Cuts the list where a limit would be passed. A tensor larger than the limit gets a part of its own.
std::vector<PartPlan> plan_parts(const std::vector<TensorDecl>& tensors,
                                 const GgufWriteOptions& options) {
  std::vector<PartPlan> parts;
  if (options.metadata_part) parts.push_back({0, 0});
  PartPlan part;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t add = round_up(tensors[i].bytes(), options.alignment);
    const std::uint64_t count = i - part.begin;
    const bool over_bytes = options.max_part_bytes > 0 && bytes + add > options.max_part_bytes;
    const bool over_count = options.max_part_tensors > 0 &&
                            count == static_cast<std::uint64_t>(options.max_part_tensors);
    if (count > 0 && (over_bytes || over_count)) {
      parts.push_back({part.begin, i});
      part.begin = i;
      bytes = 0;
    }
    bytes += add;
  }
  parts.push_back({part.begin, tensors.size()});
  return parts;
}

MetadataEntries part_metadata(const MetadataEntries& metadata, std::size_t no, std::size_t count,
                              std::size_t n_tensors) {
  if (count == 1) return metadata;
  MetadataEntries entries = no == 0 ? metadata : MetadataEntries();
  entries.emplace_back("split.no", static_cast<std::uint16_t>(no));
  entries.emplace_back("split.count", static_cast<std::uint16_t>(count));
  entries.emplace_back("split.tensors.count", static_cast<std::int32_t>(n_tensors));
  return entries;
}

void write_tensor(AtomicFile& file, std::size_t index, const TensorDecl& decl,
                  std::uint64_t alignment, const Fill& fill) {
  const std::uint64_t expected = decl.bytes();
  std::uint64_t got = 0;
  fill(index, decl, [&](std::span<const std::byte> bytes) {
    got += bytes.size();
    if (got <= expected) file.write(bytes);
  });
  if (got != expected) {
    throw std::invalid_argument(file.path() + ": " + decl.name + ": filled with " +
                                std::to_string(got) + " bytes, expected " +
                                std::to_string(expected));
  }
  const std::vector<std::byte> padding(round_up(expected, alignment) - expected);
  file.write(padding);
}

std::string part_path(const std::string& path, std::size_t no, std::size_t count) {
  if (count == 1) return path;
  std::string_view prefix = path;
  if (prefix.ends_with(".gguf")) prefix.remove_suffix(5);
  return split_path(prefix, static_cast<int>(no) + 1, static_cast<int>(count));
}

}  // namespace

std::uint64_t TensorDecl::bytes() const {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument(name + ": " + what);
  };
  if (dims.empty() || dims.size() > 4)
    fail(std::to_string(dims.size()) + " dimensions, expected 1 to 4");
  std::int64_t product = 1;
  for (const std::int64_t dim : dims) {
    if (dim <= 0) fail("dimension " + std::to_string(dim));
    if (__builtin_mul_overflow(product, dim, &product))
      fail("the product of its dimensions overflows");
  }
  const BlockTraits& t = traits(type);
  if (dims[0] % t.elems != 0) {
    fail("rows of " + std::to_string(dims[0]) + " elements are not whole blocks of " +
         std::to_string(t.elems) + " (" + t.name + ")");
  }
  std::uint64_t total = 0;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(product / t.elems),
                             static_cast<std::uint64_t>(t.bytes), &total)) {
    fail("its size in bytes overflows");
  }
  return total;
}

std::vector<std::byte> encode_gguf_header(const MetadataEntries& metadata,
                                          std::span<const TensorDecl> tensors,
                                          const GgufWriteOptions& options) {
  check_alignment(metadata, options.alignment);
  MetadataEntries entries = metadata;
  if (options.alignment != kDefaultAlignment) {
    entries.emplace_back(kAlignmentKey, static_cast<std::uint32_t>(options.alignment));
  }
  Bytes to;
  to.raw("GGUF", 4);
  to.number(options.version);
  to.number<std::uint64_t>(tensors.size());
  to.number<std::uint64_t>(entries.size());
  for (const auto& [key, value] : entries) {
    to.string(key);
    to.type(value.type());
    put_payload(to, value);
  }
  std::uint64_t offset = 0;
  for (const TensorDecl& t : tensors) {
    to.string(t.name);
    to.number(static_cast<std::uint32_t>(t.dims.size()));
    for (const std::int64_t dim : t.dims) to.number(dim);
    to.number(static_cast<std::uint32_t>(t.type));
    to.number(offset);
    offset += round_up(t.bytes(), options.alignment);
  }
  to.out.resize(round_up(to.out.size(), options.alignment));
  return std::move(to.out);
}

std::vector<std::string> write_gguf(const std::string& path, const MetadataEntries& metadata,
                                    const std::vector<TensorDecl>& tensors,
                                    const GgufWriteOptions& options, const Fill& fill) {
  check_alignment(metadata, options.alignment);
  const std::vector<PartPlan> parts = plan_parts(tensors, options);
  if (parts.size() > 65535) {
    throw std::invalid_argument(path + ": " + std::to_string(parts.size()) +
                                " parts, a split has at most 65535");
  }
  // Renamed together at the end, so that a failure leaves no part of a set that cannot be loaded.
  std::vector<AtomicFile> files;
  for (std::size_t no = 0; no < parts.size(); ++no) {
    const PartPlan& part = parts[no];
    AtomicFile file(part_path(path, no, parts.size()));
    const std::span<const TensorDecl> own(tensors.data() + part.begin, part.end - part.begin);
    file.write(encode_gguf_header(part_metadata(metadata, no, parts.size(), tensors.size()), own,
                                  options));
    for (std::size_t i = part.begin; i < part.end && !options.header_only; ++i) {
      write_tensor(file, i, tensors[i], options.alignment, fill);
    }
    file.sync();
    files.push_back(std::move(file));
  }
  std::vector<std::string> paths;
  for (AtomicFile& file : files) {
    file.commit();
    paths.push_back(file.path());
  }
  return paths;
}

}  // namespace k3
