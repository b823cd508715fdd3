#include "rank/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

// What is read is written again by recursion; deeper than this is nobody's tool list.
constexpr std::size_t kMaxDepth = 500;

std::string place(std::string_view text, std::size_t at) {
  at = std::min(at, text.size());
  const auto before = text.substr(0, at);
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const auto line_begin = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
  return fmt::format("line {}, column {}", line, at - line_begin + 1);
}

// nlohmann's own reader turns an integer past 64 bits into a double; this one sees the digits.
class Reader : public nlohmann::json_sax<Json> {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  Json result() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool v) override { return put(v); }
  bool number_integer(number_integer_t v) override { return put(v); }
  bool number_unsigned(number_unsigned_t v) override { return put(v); }
  bool number_float(number_float_t v, const string_t& spelled) override {
    if (spelled.find_first_of(".eE") != spelled.npos) return put(v);
    return put(Json::binary({spelled.begin(), spelled.end()}));
  }
  bool string(string_t& v) override { return put(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& k) override {
    key_ = std::move(k);
    return true;
  }
  bool parse_error(std::size_t at, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw std::invalid_argument("not JSON at " + place(text_, at == 0 ? 0 : at - 1));
  }

 private:
  bool put(Json v) {
    add(std::move(v));
    return true;
  }
  bool open(Json v) {
    if (stack_.size() == kMaxDepth) {
      throw std::invalid_argument(fmt::format("JSON nested more than {} levels deep", kMaxDepth));
    }
    stack_.push_back(add(std::move(v)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }
  // Only the innermost value grows, so the pointers on the stack stay good.
  Json* add(Json v) {
    if (stack_.empty()) return &(root_ = std::move(v));
    Json& parent = *stack_.back();
    if (parent.is_object()) return &(parent[key_] = std::move(v));
    parent.push_back(std::move(v));
    return &parent.back();
  }

  std::string_view text_;
  Json root_;
  std::vector<Json*> stack_;
  std::string key_;
};

// As Python's repr: the shortest digits, plain from 1e-4 up to 1e16, else with an exponent of at
// least two digits.
void append_double(double value, std::string& out) {
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::scientific);
  std::string_view spelled(buffer.data(), static_cast<std::size_t>(end.ptr - buffer.data()));
  const std::string_view e = spelled.substr(spelled.find('e') + 1);
  int exponent = 0;
  std::from_chars(e.data() + (e[0] == '+' ? 1 : 0), e.data() + e.size(), exponent);
  if (exponent < -4 || exponent >= 16) {
    out += spelled;  // to_chars too writes two digits or more
    return;
  }
  if (spelled[0] == '-') {
    out += '-';
    spelled.remove_prefix(1);
  }
  std::string digits(1, spelled[0]);
  if (spelled[1] == '.') digits += spelled.substr(2, spelled.find('e') - 2);
  const int n = static_cast<int>(digits.size());
  if (exponent < 0) {
    out += "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  } else if (n <= exponent + 1) {
    out += digits + std::string(static_cast<std::size_t>(exponent + 1 - n), '0') + ".0";
  } else {
    const auto point = static_cast<std::size_t>(exponent + 1);
    out += digits.substr(0, point) + "." + digits.substr(point);
  }
}

class Writer {
 public:
  Writer(JsonStyle style, std::string& out) : style_(style), out_(out) {}

  void value(const Json& v) {
    switch (v.type()) {
      case Json::value_t::object:
        return object(v);
      case Json::value_t::array:
        return array(v);
      case Json::value_t::string:
        return string(v.get_ref<const std::string&>());
      case Json::value_t::number_float:
        return append_double(v.get<double>(), out_);
      case Json::value_t::binary: {
        const auto& digits = v.get_binary();
        out_.append(digits.begin(), digits.end());
        return;
      }
      default:
        out_ += v.dump();
    }
  }

 private:
  void string(std::string_view s) {
    out_ += '"';
    append_escaped(s, out_);
    out_ += '"';
  }
  void array(const Json& v) {
    out_ += '[';
    for (bool first = true; const Json& item : v) {
      if (!std::exchange(first, false)) out_ += comma();
      value(item);
    }
    out_ += ']';
  }
  void object(const Json& v) {
    using Member = std::pair<std::string_view, const Json*>;
    std::vector<Member> members;
    for (const auto& item : v.items()) members.emplace_back(item.key(), &item.value());
    // Bytes of UTF-8 sort as the characters do.
    if (style_.sorted) std::sort(members.begin(), members.end());
    out_ += '{';
    for (bool first = true; const auto& [key, member] : members) {
      if (!std::exchange(first, false)) out_ += comma();
      string(key);
      out_ += style_.compact ? ":" : ": ";
      value(*member);
    }
    out_ += '}';
  }
  const char* comma() const { return style_.compact ? "," : ", "; }

  JsonStyle style_;
  std::string& out_;
};

}  // namespace

nlohmann::ordered_json read_json(std::string_view text) {
  Reader reader(text);
  Json::sax_parse(text.begin(), text.end(), &reader);
  return reader.result();
}

std::string write_json(const nlohmann::ordered_json& value, JsonStyle style) {
  std::string out;
  Writer(style, out).value(value);
  return out;
}

void append_escaped(std::string_view text, std::string& out) {
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
}

std::string describe_json(const nlohmann::ordered_json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    default:
      return "a number";
  }
}

}  // namespace k3
