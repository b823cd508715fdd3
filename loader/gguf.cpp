#include "loader/gguf.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <unordered_set>

namespace k3 {
namespace {

constexpr std::uint64_t kMaxKeyBytes = 65535;      // the format's own limit
constexpr std::uint64_t kMaxTensorNameBytes = 64;  // likewise
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMinAlignment = 8;
// The least a key with its value, and a tensor's entry, can take.
constexpr std::uint64_t kMinEntryBytes = 8 + 1 + 4 + 1;
constexpr std::uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;
// Room taken ahead of the bytes that justify it, in elements.
constexpr std::uint64_t kMaxReserve = 4096;

// Reads the header front to back through a window, so that a source sees few large reads.
class Reader {
 public:
  explicit Reader(const Source& source)
      : source_(source), end_(std::min(source.size(), kMaxHeaderBytes)) {}

  // What is being read, for errors.
  std::string context = "the header";

  std::uint64_t position() const { return window_begin_ + used_; }
  std::uint64_t left() const { return end_ - position(); }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(source_.name() + ": " + context + ": " + what);
  }

  void read(void* out, std::uint64_t n) {
    if (n > left()) fail_end(n);
    std::byte* to = static_cast<std::byte*>(out);
    while (n > 0) {
      if (used_ == filled_) refill();
      const std::size_t take =
          static_cast<std::size_t>(std::min<std::uint64_t>(n, filled_ - used_));
      std::memcpy(to, window_.data() + used_, take);
      used_ += take;
      to += take;
      n -= take;
    }
  }

  template <class T>
  T number() {
    T v;
    read(&v, sizeof v);
    return v;
  }

  // Throws unless `count` items of at least `min_bytes` each can still follow.
  void check_count(std::uint64_t count, std::uint64_t min_bytes, const char* what) const {
    if (count > left() / min_bytes) {
      fail(std::to_string(count) + " " + what + " cannot fit in the " + std::to_string(left()) +
           " bytes that " + (end_ == source_.size() ? "are left" : "a header may still take"));
    }
  }

  std::string string() {
    const std::uint64_t n = number<std::uint64_t>();
    check_count(n, 1, "bytes of text");
    std::string s(static_cast<std::size_t>(n), '\0');
    read(s.data(), n);
    return s;
  }

  // A key or tensor name: 1 to `longest` bytes, nothing that would break a line.
  std::string name(std::uint64_t longest) {
    const std::uint64_t n = number<std::uint64_t>();
    if (n == 0 || n > longest) {
      fail("name of " + std::to_string(n) + " bytes, expected 1 to " + std::to_string(longest));
    }
    std::string s(static_cast<std::size_t>(n), '\0');
    read(s.data(), n);
    for (const char c : s) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
        fail("name \"" + printable(s) + "\" holds control characters");
      }
    }
    return s;
  }

 private:
  static constexpr std::uint64_t kWindow = 256 << 10;

  [[noreturn]] void fail_end(std::uint64_t n) const {
    if (end_ < source_.size()) {
      fail("the header passes the limit of " + std::to_string(kMaxHeaderBytes) + " bytes");
    }
    fail("truncated: " + std::to_string(n) + " bytes wanted at " + std::to_string(position()) +
         ", file has " + std::to_string(source_.size()));
  }

  void refill() {
    window_begin_ += used_;
    used_ = 0;
    filled_ = static_cast<std::size_t>(std::min(kWindow, end_ - window_begin_));
    window_.resize(filled_);
    source_.read_at(window_begin_, window_);
  }

  const Source& source_;
  std::uint64_t end_;
  std::vector<std::byte> window_;
  std::uint64_t window_begin_ = 0;
  std::size_t filled_ = 0;
  std::size_t used_ = 0;
};

// ---- values -----------------------------------------------------------------------------------------------------

ValueType read_type(Reader& in, const char* what) {
  const std::uint32_t id = in.number<std::uint32_t>();
  if (id > static_cast<std::uint32_t>(ValueType::kF64)) {
    in.fail(std::string(what) + " type " + std::to_string(id) + ", expected 0 to 12");
  }
  return static_cast<ValueType>(id);
}

std::uint8_t read_bool(Reader& in) {
  const std::uint8_t byte = in.number<std::uint8_t>();
  if (byte > 1) in.fail("bool stored as " + std::to_string(byte) + ", expected 0 or 1");
  return byte;
}

Value read_scalar(Reader& in, ValueType type) {
  switch (type) {
    case ValueType::kU8:
      return in.number<std::uint8_t>();
    case ValueType::kI8:
      return in.number<std::int8_t>();
    case ValueType::kU16:
      return in.number<std::uint16_t>();
    case ValueType::kI16:
      return in.number<std::int16_t>();
    case ValueType::kU32:
      return in.number<std::uint32_t>();
    case ValueType::kI32:
      return in.number<std::int32_t>();
    case ValueType::kF32:
      return in.number<float>();
    case ValueType::kBool:
      return read_bool(in) != 0;
    case ValueType::kString:
      return in.string();
    case ValueType::kU64:
      return in.number<std::uint64_t>();
    case ValueType::kI64:
      return in.number<std::int64_t>();
    case ValueType::kF64:
      return in.number<double>();
    case ValueType::kArray:
      break;
  }
  in.fail("an array where a single value belongs");
}

template <class T>
Value read_numbers(Reader& in, std::uint64_t count) {
  in.check_count(count, sizeof(T), "elements");
  std::vector<T> items(static_cast<std::size_t>(count));
  in.read(items.data(), count * sizeof(T));
  return items;
}

Value read_strings(Reader& in, std::uint64_t count) {
  in.check_count(count, 8, "strings");
  std::vector<std::string> items;
  items.reserve(static_cast<std::size_t>(std::min(count, kMaxReserve)));
  for (std::uint64_t i = 0; i < count; ++i) items.push_back(in.string());
  return items;
}

Value read_bools(Reader& in, std::uint64_t count) {
  in.check_count(count, 1, "elements");
  BoolArray array;
  array.items.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) array.items.push_back(read_bool(in));
  return array;
}

Value read_flat_array(Reader& in, ValueType type, std::uint64_t count) {
  switch (type) {
    case ValueType::kU8:
      return read_numbers<std::uint8_t>(in, count);
    case ValueType::kI8:
      return read_numbers<std::int8_t>(in, count);
    case ValueType::kU16:
      return read_numbers<std::uint16_t>(in, count);
    case ValueType::kI16:
      return read_numbers<std::int16_t>(in, count);
    case ValueType::kU32:
      return read_numbers<std::uint32_t>(in, count);
    case ValueType::kI32:
      return read_numbers<std::int32_t>(in, count);
    case ValueType::kF32:
      return read_numbers<float>(in, count);
    case ValueType::kBool:
      return read_bools(in, count);
    case ValueType::kString:
      return read_strings(in, count);
    case ValueType::kU64:
      return read_numbers<std::uint64_t>(in, count);
    case ValueType::kI64:
      return read_numbers<std::int64_t>(in, count);
    case ValueType::kF64:
      return read_numbers<double>(in, count);
    case ValueType::kArray:
      break;
  }
  in.fail("an array where its elements belong");
}

// Arrays of arrays by a stack of the arrays that are still open, at most kMaxNesting of them.
Value read_array(Reader& in) {
  struct Open {
    NestedArray array;
    std::uint64_t left = 0;
  };
  std::vector<Open> open;
  for (;;) {
    const ValueType type = read_type(in, "array element");
    const std::uint64_t count = in.number<std::uint64_t>();
    if (type == ValueType::kArray) {
      if (open.size() == kMaxNesting) {
        in.fail("arrays nested more than " + std::to_string(kMaxNesting) + " deep");
      }
      in.check_count(count, 12, "arrays");
      open.push_back({{}, count});
    } else {
      Value flat = read_flat_array(in, type, count);
      if (open.empty()) return flat;
      open.back().array.items.push_back(std::move(flat));
      --open.back().left;
    }
    while (open.back().left == 0) {
      Value whole = std::move(open.back().array);
      open.pop_back();
      if (open.empty()) return whole;
      open.back().array.items.push_back(std::move(whole));
      --open.back().left;
    }
  }
}

// ---- the header's three parts -----------------------------------------------------------------------------------

void check_magic(Reader& in) {
  char magic[4];
  if (in.left() < sizeof magic) in.fail("not a GGUF file: " + std::to_string(in.left()) + " bytes");
  in.read(magic, sizeof magic);
  const std::string_view found(magic, sizeof magic);
  if (found == "GGUF") return;
  if (found == "FUGG") in.fail("big-endian GGUF file; only little-endian files are read");
  if (found == "vers") {
    in.fail(
        "not a GGUF file but text beginning \"vers\": a Git LFS pointer? Fetch the file itself");
  }
  in.fail("not a GGUF file: begins with \"" + printable(found) + "\", expected \"GGUF\"");
}

std::uint32_t read_version(Reader& in) {
  const std::uint32_t version = in.number<std::uint32_t>();
  if (version == 2 || version == 3) return version;
  if (version != 0 && (version & 0xffffffu) == 0) {
    in.fail("big-endian GGUF file; only little-endian files are read");
  }
  in.fail("GGUF version " + std::to_string(version) + ", expected 2 or 3");
}

void read_metadata(Reader& in, std::uint64_t count, Metadata& metadata) {
  for (std::uint64_t i = 0; i < count; ++i) {
    in.context = "key " + std::to_string(i + 1) + " of " + std::to_string(count);
    std::string key = in.name(kMaxKeyBytes);
    in.context = printable(key);
    const ValueType type = read_type(in, "value");
    Value value = type == ValueType::kArray ? read_array(in) : read_scalar(in, type);
    metadata.add(std::move(key), std::move(value));
  }
}

std::uint64_t alignment_of(const Metadata& metadata) {
  const auto stored = metadata.get<std::uint64_t>("general.alignment");
  if (!stored) return kDefaultAlignment;
  const std::uint64_t a = *stored;
  if (a < kMinAlignment || a > kMaxAlignment || (a & (a - 1)) != 0) {
    throw std::invalid_argument(metadata.file() + ": general.alignment: is " + std::to_string(a) +
                                ", expected a power of two from " + std::to_string(kMinAlignment) +
                                " to " + std::to_string(kMaxAlignment));
  }
  return a;
}

void read_dims(Reader& in, TensorInfo& t) {
  const std::uint32_t n_dims = in.number<std::uint32_t>();
  if (n_dims < 1 || n_dims > t.dims.size()) {
    in.fail(std::to_string(n_dims) + " dimensions, expected 1 to 4");
  }
  t.n_dims = static_cast<int>(n_dims);
  std::int64_t product = 1;
  for (std::uint32_t i = 0; i < n_dims; ++i) {
    const std::uint64_t dim = in.number<std::uint64_t>();
    if (dim == 0) in.fail("dimension " + std::to_string(i) + " is 0");
    if (dim > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
        __builtin_mul_overflow(product, static_cast<std::int64_t>(dim), &product)) {
      in.fail("the product of its dimensions overflows at dimension " + std::to_string(i) + " (" +
              std::to_string(dim) + ")");
    }
    t.dims[i] = static_cast<std::int64_t>(dim);
  }
}

void read_type_and_size(Reader& in, TensorInfo& t) {
  const std::uint32_t id = in.number<std::uint32_t>();
  const std::optional<BlockType> type = block_type_from_id(id);
  if (!type) {
    in.fail(std::string("tensor type ") + block_type_name(id) + " (id " + std::to_string(id) +
            ") is not one this program decodes");
  }
  t.type = *type;
  const BlockTraits& tr = traits(*type);
  if (t.dims[0] % tr.elems != 0) {
    in.fail("rows of " + std::to_string(t.dims[0]) + " elements are not whole blocks of " +
            std::to_string(tr.elems) + " (" + tr.name + ")");
  }
  const std::uint64_t blocks = static_cast<std::uint64_t>(t.n_elem() / tr.elems);
  if (__builtin_mul_overflow(blocks, static_cast<std::uint64_t>(tr.bytes), &t.bytes)) {
    in.fail("its size in bytes overflows");
  }
}

// Offsets are relative to the data section here; place_tensors() makes them absolute.
void read_tensors(Reader& in, std::uint64_t count, int part, std::vector<TensorInfo>& tensors) {
  tensors.reserve(static_cast<std::size_t>(std::min(count, kMaxReserve)));
  for (std::uint64_t i = 0; i < count; ++i) {
    in.context = "tensor " + std::to_string(i + 1) + " of " + std::to_string(count);
    TensorInfo t;
    t.part = part;
    t.name = in.name(kMaxTensorNameBytes);
    in.context = printable(t.name);
    read_dims(in, t);
    read_type_and_size(in, t);
    t.offset = in.number<std::uint64_t>();
    tensors.push_back(std::move(t));
  }
}

// ---- checks of the whole ----------------------------------------------------------------------------------------

void place_tensors(GgufHeader& h, std::uint64_t file_size, bool header_only) {
  for (TensorInfo& t : h.tensors) {
    const auto fail = [&](const std::string& what) {
      throw std::invalid_argument(h.file + ": " + printable(t.name) + ": " + what);
    };
    if (t.offset % h.alignment != 0) {
      fail("begins at data offset " + std::to_string(t.offset) +
           ", which is not a multiple of the alignment " + std::to_string(h.alignment));
    }
    std::uint64_t end = 0;
    if (__builtin_add_overflow(t.offset, h.data_begin, &t.offset) ||
        __builtin_add_overflow(t.offset, t.bytes, &end) ||
        end > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail("its offset overflows");
    }
    if (!header_only && end > file_size) {
      fail("ends at byte " + std::to_string(end) + ", file has " + std::to_string(file_size));
    }
  }
}

void check_unique_names(const GgufHeader& h) {
  std::unordered_set<std::string_view> names;
  for (const TensorInfo& t : h.tensors) {
    if (!names.insert(t.name).second) {
      throw std::invalid_argument(h.file + ": " + printable(t.name) + ": the tensor occurs twice");
    }
  }
}

void check_no_overlap(const GgufHeader& h) {
  std::vector<const TensorInfo*> by_offset;
  by_offset.reserve(h.tensors.size());
  for (const TensorInfo& t : h.tensors) by_offset.push_back(&t);
  std::sort(by_offset.begin(), by_offset.end(),
            [](const TensorInfo* a, const TensorInfo* b) { return a->offset < b->offset; });
  for (std::size_t i = 1; i < by_offset.size(); ++i) {
    const TensorInfo& a = *by_offset[i - 1];
    const TensorInfo& b = *by_offset[i];
    if (b.offset - a.offset < a.bytes) {
      throw std::invalid_argument(h.file + ": " + printable(b.name) + ": begins at byte " +
                                  std::to_string(b.offset) + ", inside " + printable(a.name) +
                                  ", which ends at byte " + std::to_string(a.offset + a.bytes));
    }
  }
}

}  // namespace

std::string TensorInfo::shape() const {
  std::string text = "[";
  for (int i = 0; i < std::max(n_dims, 1); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

GgufHeader read_gguf(const Source& source, const GgufReadOptions& options) {
  GgufHeader h;
  h.file = source.name();
  h.metadata = Metadata(source.name());
  Reader in(source);
  check_magic(in);
  h.version = read_version(in);
  const std::uint64_t n_tensors = in.number<std::uint64_t>();
  const std::uint64_t n_keys = in.number<std::uint64_t>();
  in.check_count(n_keys, kMinEntryBytes, "metadata keys");
  in.check_count(n_tensors, kMinTensorBytes, "tensors");
  read_metadata(in, n_keys, h.metadata);
  h.alignment = alignment_of(h.metadata);
  in.context = "the tensor table";
  in.check_count(n_tensors, kMinTensorBytes, "tensors");
  read_tensors(in, n_tensors, options.part, h.tensors);
  h.header_bytes = in.position();
  h.data_begin = (h.header_bytes + h.alignment - 1) / h.alignment * h.alignment;
  place_tensors(h, source.size(), options.header_only);
  check_unique_names(h);
  check_no_overlap(h);
  return h;
}

}  // namespace k3
