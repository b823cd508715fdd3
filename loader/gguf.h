// The header of a GGUF file (versions 2 and 3, little-endian): metadata and tensor table. Every check on a file is made
// in read_gguf(); whoever holds a GgufHeader may trust its numbers. Untrusted input: counts and lengths are held
// against the bytes that are left before anything is allocated, products are checked, nothing recurses.
//
// Errors are std::invalid_argument: "FILE: key or tensor: what was found, what was expected".
// Source of the format: the GGUF description in ggml's docs; type ids in loader/blocks.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "loader/blocks.h"
#include "loader/source.h"

namespace k3 {

// Values are the ids stored in the file.
enum class ValueType : std::uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// "u32", "string", "array"; "type 99" is spelled by the caller: ids are checked first.
const char* value_type_name(ValueType type);

struct Value;

// vector<bool> packs bits and has no bytes to point at, hence a type of its own.
struct BoolArray {
  std::vector<std::uint8_t> items;
  bool operator==(const BoolArray&) const = default;
};

// An array whose elements are arrays; at most kMaxNesting deep.
struct NestedArray {
  std::vector<Value> items;
  bool operator==(const NestedArray&) const;
};

// One metadata value with the type it was stored as. Arrays keep their elements' type too.
struct Value {
  using Data =
      std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t,
                   std::int32_t, std::uint64_t, std::int64_t, float, double, bool, std::string,
                   std::vector<std::uint8_t>, std::vector<std::int8_t>, std::vector<std::uint16_t>,
                   std::vector<std::int16_t>, std::vector<std::uint32_t>, std::vector<std::int32_t>,
                   std::vector<std::uint64_t>, std::vector<std::int64_t>, std::vector<float>,
                   std::vector<double>, std::vector<std::string>, BoolArray, NestedArray>;
  Data data;

  Value() = default;
  template <class T>
  requires(!std::is_same_v<std::decay_t<T>, Value> && !std::is_convertible_v<T, const char*>)
      Value(T&& v)
      : data(std::forward<T>(v)) {}  // NOLINT: metadata is written as plain values
  Value(const char* s) : data(std::string(s)) {}

  ValueType type() const;          // kArray for every array
  ValueType element_type() const;  // of an array; type() of a scalar
  bool is_array() const { return type() == ValueType::kArray; }
  std::size_t size() const;      // elements of an array; 1 for a scalar
  std::string describe() const;  // "u32 4", "string", "array of 93 i32": for errors and listings
  bool operator==(const Value&) const = default;
};

// Keys to values, in the order of the file.
class Metadata {
 public:
  Metadata() = default;
  explicit Metadata(std::string file) : file_(std::move(file)) {}

  // Throws std::invalid_argument when the key is already there.
  void add(std::string key, Value value);

  const std::vector<std::pair<std::string, Value>>& entries() const { return entries_; }
  const Value* find(std::string_view key) const;

  // nullopt: the key is absent. A value of another kind, or one that T cannot hold, throws std::invalid_argument naming
  // file and key. T: any integer (any stored width and sign that fits), bool, float or double (stored as either, or as an
  // integer that T holds exactly), std::string.
  template <class T>
  std::optional<T> get(std::string_view key) const;

  // The same for arrays of these.
  template <class T>
  std::optional<std::vector<T>> get_array(std::string_view key) const;

  // An array of strings without copying it; null when the key is absent.
  const std::vector<std::string>* strings(std::string_view key) const;

  // get() for a key that must be there: its absence throws, naming file and key.
  template <class T>
  T require(std::string_view key) const {
    std::optional<T> v = get<T>(key);
    if (!v) throw std::invalid_argument(missing(key));
    return *std::move(v);
  }

  const std::string& file() const { return file_; }

 private:
  struct Int {  // any stored integer: a sign and a magnitude
    bool negative = false;
    std::uint64_t magnitude = 0;
  };
  std::string missing(std::string_view key) const;
  Int integer_at(std::string_view key, const Value& v, std::size_t i) const;
  double real_at(std::string_view key, const Value& v, std::size_t i, bool narrow) const;
  bool bool_at(std::string_view key, const Value& v, std::size_t i) const;
  const std::string& string_at(std::string_view key, const Value& v, std::size_t i) const;
  [[noreturn]] void refuse(std::string_view key, const Value& v, std::string_view wanted) const;

  template <class T>
  T at(std::string_view key, const Value& v, std::size_t i) const;

  std::string file_;
  std::vector<std::pair<std::string, Value>> entries_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

struct TensorInfo {
  std::string name;
  BlockType type = BlockType::kF32;
  std::array<std::int64_t, 4> dims{1, 1, 1, 1};  // fastest first, padded with 1
  int n_dims = 0;                                // as stored, 1 to 4
  int part = 0;                                  // 0-based file of the model
  std::uint64_t offset = 0;                      // of the first byte, absolute in that file
  std::uint64_t bytes = 0;

  std::int64_t n_elem() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
  std::int64_t row_bytes() const {
    return static_cast<std::int64_t>(block_bytes(type, static_cast<std::uint64_t>(dims[0])));
  }
  std::string shape() const;  // "[7168, 96]", n_dims numbers
};

struct GgufHeader {
  std::string file;
  std::uint32_t version = 0;
  std::uint64_t alignment = 0;  // of tensor data, bytes
  std::uint64_t data_begin =
      0;  // offset of the data section: the header rounded up to the alignment
  std::uint64_t header_bytes = 0;
  Metadata metadata;
  std::vector<TensorInfo> tensors;  // in the order of the file
};

struct GgufReadOptions {
  int part = 0;  // copied into each TensorInfo
  bool header_only =
      false;  // the data may be absent: offsets are checked among themselves, not against the file's end
};

inline constexpr std::size_t kMaxNesting = 4;
inline constexpr std::uint64_t kMaxAlignment = std::uint64_t{1} << 20;
// Metadata and tensor table together; the real model's take 10 MB. The limit keeps a huge hostile file from filling RAM.
inline constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{256} << 20;

GgufHeader read_gguf(const Source& source, const GgufReadOptions& options = {});

// Text from a file made fit for a one-line error: control and non-ASCII bytes as \xNN, at most 80 characters.
std::string printable(std::string_view text);

// ---- templates --------------------------------------------------------------------------------------------------

template <class T>
T Metadata::at(std::string_view key, const Value& v, std::size_t i) const {
  if constexpr (std::is_same_v<T, bool>) {
    return bool_at(key, v, i);
  } else if constexpr (std::is_integral_v<T>) {
    const Int n = integer_at(key, v, i);
    const std::uint64_t top = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
    const std::uint64_t limit = !n.negative ? top : std::is_signed_v<T> ? top + 1 : 0;
    if (n.magnitude > limit) {
      refuse(key, v,
             "an integer from " + std::to_string(std::numeric_limits<T>::min()) + " to " +
                 std::to_string(std::numeric_limits<T>::max()));
    }
    return static_cast<T>(n.negative ? std::uint64_t{0} - n.magnitude : n.magnitude);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(real_at(key, v, i, sizeof(T) < sizeof(double)));
  } else {
    static_assert(std::is_same_v<T, std::string>, "integers, bool, float, double or std::string");
    return string_at(key, v, i);
  }
}

template <class T>
std::optional<T> Metadata::get(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return std::nullopt;
  if (v->is_array()) refuse(key, *v, "a single value");
  return at<T>(key, *v, 0);
}

template <class T>
std::optional<std::vector<T>> Metadata::get_array(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return std::nullopt;
  if (!v->is_array()) refuse(key, *v, "an array");
  std::vector<T> out;
  out.reserve(v->size());
  for (std::size_t i = 0; i < v->size(); ++i) out.push_back(at<T>(key, *v, i));
  return out;
}

}  // namespace k3
