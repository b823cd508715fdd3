#include "rank/node_profile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <vector>

#include <nlohmann/json.hpp>

namespace k3 {
namespace {

using Json = nlohmann::json;

// Reads keys of one object and remembers which: what is left over is a misspelt key.
class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) fail("", "expected an object");
  }

  std::string text(const char* key) {
    const Json& v = at(key);
    if (!v.is_string() || v.get<std::string>().empty())
      fail(key, "expected a text that is not empty");
    return v.get<std::string>();
  }
  int count(const char* key) {
    const Json& v = at(key);
    if (!v.is_number_integer() || v.get<std::int64_t>() < 1 || v.get<std::int64_t>() > 4096)
      fail(key, "expected a whole number from 1 to 4096");
    return v.get<int>();
  }
  Figure figure(const char* key) {
    Reader r(at(key), where_ + ": " + key);
    Figure f;
    const Json& v = r.at("value");
    if (!v.is_number() || !(v.get<double>() > 0) || !std::isfinite(v.get<double>()))
      r.fail("value", "expected a number above 0");
    f.value = v.get<double>();
    f.basis = r.text("basis");
    constexpr std::array kBases{"measured", "datasheet", "derived", "allowance"};
    if (std::find(kBases.begin(), kBases.end(), f.basis) == kBases.end())
      r.fail("basis", "found " + f.basis + ", expected measured, datasheet, derived or allowance");
    f.source = r.text("source");
    r.end();
    return f;
  }
  std::optional<Figure> figure_if_any(const char* key) {
    if (!object_.contains(key)) return std::nullopt;
    return figure(key);
  }
  void end() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::find(seen_.begin(), seen_.end(), key) == seen_.end())
        fail(key, "is not a key of a node profile");
    }
  }

 private:
  const Json& at(const char* key) {
    seen_.emplace_back(key);
    const auto it = object_.find(key);
    if (it == object_.end()) fail(key, "is missing");
    return *it;
  }
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw std::invalid_argument(where_ + ": " + (key.empty() ? "" : key + ": ") + what);
  }

  const Json& object_;
  std::string where_;
  std::vector<std::string> seen_;
};

}  // namespace

NodeProfile parse_node_profile(std::string_view text, const std::string& file) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded()) throw std::invalid_argument(file + ": is not JSON");
  Reader r(json, file);
  NodeProfile p;
  p.name = r.text("name");
  p.device = r.text("device");
  p.devices = r.count("devices");
  p.hosts = r.count("hosts");
  p.memory_gib = r.figure("memory_gib");
  p.reserve_gib = r.figure("reserve_gib");
  p.read_gb_s = r.figure("read_gb_s");
  p.read_measured_gb_s = r.figure_if_any("read_measured_gb_s");
  p.bf16_tflops = r.figure("bf16_tflops");
  p.bf16_measured_tflops = r.figure_if_any("bf16_measured_tflops");
  p.link_gb_s = r.figure("link_gb_s");
  p.link_latency_us = r.figure_if_any("link_latency_us");
  r.end();
  if (p.budget_gib() <= 0)
    throw std::invalid_argument(file + ": reserve_gib: leaves nothing of memory_gib");
  if (p.devices % p.hosts != 0)
    throw std::invalid_argument(file + ": hosts: does not divide devices");
  return p;
}

}  // namespace k3
