// Typed access to metadata (gguf.h). Parsing is in gguf.cpp.
#include <cmath>
#include <cstdio>
#include <limits>

#include "loader/gguf.h"

namespace k3 {
namespace {

constexpr const char* kTypeNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                      "bool", "string", "array", "u64", "i64", "f64"};

// The element type of each alternative of Value::Data, in its order.
constexpr ValueType kElementTypes[] = {
    ValueType::kU8,   ValueType::kI8,     ValueType::kU16,    ValueType::kI16,  ValueType::kU32,
    ValueType::kI32,  ValueType::kU64,    ValueType::kI64,    ValueType::kF32,  ValueType::kF64,
    ValueType::kBool, ValueType::kString, ValueType::kU8,     ValueType::kI8,   ValueType::kU16,
    ValueType::kI16,  ValueType::kU32,    ValueType::kI32,    ValueType::kU64,  ValueType::kI64,
    ValueType::kF32,  ValueType::kF64,    ValueType::kString, ValueType::kBool, ValueType::kArray};
static_assert(std::size(kElementTypes) == std::variant_size_v<Value::Data>);
constexpr std::size_t kFirstArray = 12;  // of the alternatives
static_assert(std::is_same_v<std::variant_alternative_t<kFirstArray, Value::Data>,
                             std::vector<std::uint8_t>>);

template <class T>
struct ItemsOf {
  static constexpr bool kIsArray = false;
};
template <class T>
struct ItemsOf<std::vector<T>> {
  static constexpr bool kIsArray = true;
  static const std::vector<T>& items(const std::vector<T>& v) { return v; }
};
template <>
struct ItemsOf<BoolArray> {
  static constexpr bool kIsArray = true;
  static const std::vector<std::uint8_t>& items(const BoolArray& v) { return v.items; }
};
template <>
struct ItemsOf<NestedArray> {
  static constexpr bool kIsArray = true;
  static const std::vector<Value>& items(const NestedArray& v) { return v.items; }
};

// Calls f with the i-th element of an array, or with the scalar itself.
template <class F>
auto with_element(const Value& v, std::size_t i, F&& f) {
  return std::visit(
      [&](const auto& held) {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (ItemsOf<Held>::kIsArray) {
          return f(ItemsOf<Held>::items(held)[i]);
        } else {
          return f(held);
        }
      },
      v.data);
}

std::string number_text(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", v);
  return text;
}

}  // namespace

const char* value_type_name(ValueType type) { return kTypeNames[static_cast<std::size_t>(type)]; }

bool NestedArray::operator==(const NestedArray& other) const { return items == other.items; }

ValueType Value::type() const {
  return data.index() >= kFirstArray ? ValueType::kArray : kElementTypes[data.index()];
}

ValueType Value::element_type() const { return kElementTypes[data.index()]; }

std::size_t Value::size() const {
  return std::visit(
      [](const auto& held) -> std::size_t {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (ItemsOf<Held>::kIsArray) {
          return ItemsOf<Held>::items(held).size();
        } else {
          return 1;
        }
      },
      data);
}

std::string Value::describe() const {
  const std::string type_text = value_type_name(element_type());
  if (is_array()) return "array of " + std::to_string(size()) + " " + type_text;
  return with_element(*this, 0, [&](const auto& v) -> std::string {
    using T = std::decay_t<decltype(v)>;
    if constexpr (std::is_same_v<T, std::string>) {
      return "string \"" + printable(v) + "\"";
    } else if constexpr (std::is_same_v<T, bool>) {
      return v ? "bool true" : "bool false";
    } else if constexpr (std::is_integral_v<T>) {
      return type_text + " " + std::to_string(v);
    } else if constexpr (std::is_floating_point_v<T>) {
      return type_text + " " + number_text(v);
    } else {
      return type_text;
    }
  });
}

void Metadata::add(std::string key, Value value) {
  if (!index_.emplace(key, entries_.size()).second) {
    throw std::invalid_argument(file_ + ": " + printable(key) + ": the key occurs twice");
  }
  entries_.emplace_back(std::move(key), std::move(value));
}

const Value* Metadata::find(std::string_view key) const {
  const auto it = index_.find(key);
  return it == index_.end() ? nullptr : &entries_[it->second].second;
}

const std::vector<std::string>* Metadata::strings(std::string_view key) const {
  const Value* v = find(key);
  if (!v) return nullptr;
  const auto* items = std::get_if<std::vector<std::string>>(&v->data);
  if (!items) refuse(key, *v, "an array of strings");
  return items;
}

std::string Metadata::missing(std::string_view key) const {
  return file_ + ": " + printable(key) + ": the key is missing";
}

void Metadata::refuse(std::string_view key, const Value& v, std::string_view wanted) const {
  throw std::invalid_argument(file_ + ": " + printable(key) + ": is " + v.describe() +
                              ", expected " + std::string(wanted));
}

Metadata::Int Metadata::integer_at(std::string_view key, const Value& v, std::size_t i) const {
  return with_element(v, i, [&](const auto& held) -> Int {
    using T = std::decay_t<decltype(held)>;
    // A bool array's bytes are not integers, though they are stored as bytes.
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      if (v.element_type() != ValueType::kBool) {
        if (held < 0) return {true, std::uint64_t{0} - static_cast<std::uint64_t>(held)};
        return {false, static_cast<std::uint64_t>(held)};
      }
    }
    refuse(key, v, "an integer");
  });
}

double Metadata::real_at(std::string_view key, const Value& v, std::size_t i, bool narrow) const {
  return with_element(v, i, [&](const auto& held) -> double {
    using T = std::decay_t<decltype(held)>;
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      const double d = held;
      if (narrow && std::isfinite(d) && std::abs(d) > std::numeric_limits<float>::max()) {
        refuse(key, v, "a number that fits a 32-bit float");
      }
      return d;
    } else if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      if (v.element_type() != ValueType::kBool) {
        const Int n = integer_at(key, v, i);
        const std::uint64_t limit = std::uint64_t{1} << (narrow ? 24 : 53);
        if (n.magnitude > limit) refuse(key, v, "a number that a float holds exactly");
        const double d = static_cast<double>(n.magnitude);
        return n.negative ? -d : d;
      }
    }
    refuse(key, v, "a number");
  });
}

bool Metadata::bool_at(std::string_view key, const Value& v, std::size_t i) const {
  if (v.element_type() != ValueType::kBool) refuse(key, v, "a bool");
  if (const auto* array = std::get_if<BoolArray>(&v.data)) return array->items[i] != 0;
  return std::get<bool>(v.data);
}

const std::string& Metadata::string_at(std::string_view key, const Value& v, std::size_t i) const {
  if (v.element_type() != ValueType::kString) refuse(key, v, "a string");
  if (const auto* array = std::get_if<std::vector<std::string>>(&v.data)) return (*array)[i];
  return std::get<std::string>(v.data);
}

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  std::string out;
  for (const char c : text) {
    if (out.size() >= kLongest) return out + "...";
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
      out += escaped;
    }
  }
  return out;
}

}  // namespace k3
