// JSON text with nothing lost: members in their order, every number exact, written as the reference
// encoder of the chat markup writes it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace k3 {

// Reads one JSON value. The members of an object keep their order; of two with the same key the
// later value stands in the earlier place. An integer past 64 bits is kept as its digits, in a
// binary value, which JSON itself cannot hold and write_json spells as the number again.
// Throws std::invalid_argument, without naming a file: not JSON, with line and column; nested more
// than 500 levels deep.
nlohmann::ordered_json read_json(std::string_view text);

struct JsonStyle {
  bool compact = false;  // no blank after ':' and ','
  bool sorted = false;   // members by key, at every depth
};

// On one line, text beyond ASCII unescaped. Floating-point numbers are the shortest that read back
// the same, as Python's repr spells them (1.0, 1e-05, 1e+16). Source of the two styles: the
// published K3 encoder, which writes with Python's json.
std::string write_json(const nlohmann::ordered_json& value, JsonStyle style = {});

// Appends `text`, valid UTF-8, as it stands between the quotes of a JSON string.
void append_escaped(std::string_view text, std::string& out);

// For messages: "a string", "an object", "null", ...
std::string describe_json(const nlohmann::ordered_json& value);

}  // namespace k3
