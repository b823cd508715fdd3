#include "rank/json_text.h"

#include <doctest/doctest.h>

#include <stdexcept>
#include <string>

using namespace k3;

namespace {

constexpr JsonStyle kDeclared{.compact = true, .sorted = true};

std::string message_of(const std::string& text) {
  try {
    read_json(text);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("JSON is written in the order it was read, or sorted at every depth") {
  const auto v = read_json(R"({"b":{"z":1,"a":[{"y":2,"x":3}]},"a":null})");
  CHECK(write_json(v) == R"({"b": {"z": 1, "a": [{"y": 2, "x": 3}]}, "a": null})");
  CHECK(write_json(v, kDeclared) == R"({"a":null,"b":{"a":[{"x":3,"y":2}],"z":1}})");
  CHECK(write_json(read_json(R"({"k":1,"l":2,"k":3})")) == R"({"k": 3, "l": 2})");
  // U+FFFF is before U+10000 as a character, behind it in UTF-16.
  CHECK(write_json(read_json(R"({"\ud800\udc00":1,"\uffff":2,"B":3,"a":4})"), kDeclared) ==
        "{\"B\":3,\"a\":4,\"\xef\xbf\xbf\":2,\"\xf0\x90\x80\x80\":1}");
}

TEST_CASE("numbers come out as Python spells them, integers of any length unchanged") {
  const auto back = [](const std::string& s) { return write_json(read_json(s)); };
  for (const char* same : {"0", "-1", "18446744073709551615", "-9223372036854775808",
                           "123456789012345678901234567890", "-98765432109876543210", "1.5", "0.1",
                           "-0.0", "1e+16", "1e-05", "1.7976931348623157e+308", "5e-324"}) {
    CHECK(back(same) == same);
  }
  CHECK(back("1.0") == "1.0");
  CHECK(back("1.50") == "1.5");
  CHECK(back("1e3") == "1000.0");
  CHECK(back("1E15") == "1000000000000000.0");
  CHECK(back("1234567.25") == "1234567.25");
  CHECK(back("0.0001") == "0.0001");
  CHECK(back("0.00001") == "1e-05");
  CHECK(back("-2.5e-7") == "-2.5e-07");
  CHECK(back("1.25e22") == "1.25e+22");
}

TEST_CASE("text beyond ASCII stays as it is, control characters are escaped") {
  CHECK(write_json(read_json(R"(["\u00e9\u6771\ud83d\ude00\u007f\/","\u0001\n\t\"\\\b\f\r"])")) ==
        "[\"é東😀\x7f/\", \"\\u0001\\n\\t\\\"\\\\\\b\\f\\r\"]");
}

TEST_CASE("what is not JSON is refused with its place") {
  CHECK(message_of("{\"a\": 1,\n \"b\" 2}") == "not JSON at line 2, column 6");
  CHECK(message_of("") == "not JSON at line 1, column 1");
  CHECK(message_of("{} x") == "not JSON at line 1, column 4");
  CHECK(message_of("[1") == "not JSON at line 1, column 3");
  CHECK(message_of("[1e999]").starts_with("not JSON at line 1"));
  CHECK(message_of("[\"\xff\"]").starts_with("not JSON at line 1"));
  CHECK(message_of(std::string(500, '[') + std::string(500, ']')) == "accepted");
  CHECK(message_of(std::string(501, '[') + std::string(501, ']')) ==
        "JSON nested more than 500 levels deep");
  CHECK(message_of(std::string(1000000, '[')) == "JSON nested more than 500 levels deep");
}
