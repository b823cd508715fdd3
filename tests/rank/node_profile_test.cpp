#include "rank/node_profile.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::has;
using test::refusal;
using Json = nlohmann::json;

Json figure(double value) {
  return {{"value", value}, {"basis", "datasheet"}, {"source", "a page"}};
}

Json profile() {
  return {{"name", "n"},
          {"device", "d"},
          {"devices", 4},
          {"hosts", 2},
          {"memory_gib", figure(100)},
          {"reserve_gib", figure(2)},
          {"read_gb_s", figure(1000)},
          {"bf16_tflops", figure(500)},
          {"link_gb_s", figure(50)}};
}

std::string refused(const Json& j) {
  return refusal([&] { parse_node_profile(j.dump(), "n.json"); });
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST_CASE("every profile in launch/nodes reads, and is called as its file is") {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(K3_NODE_DIR)) {
    CAPTURE(entry.path());
    const NodeProfile p = parse_node_profile(text_of(entry.path()), entry.path().string());
    CHECK(p.name == entry.path().stem().string());
    CHECK(p.name.ends_with("x" + std::to_string(p.devices)));
    ++n;
  }
  CHECK(n >= 7);
}

TEST_CASE("what was measured goes before the data sheet, and the reserve is taken off the memory") {
  Json j = profile();
  NodeProfile p = parse_node_profile(j.dump(), "n.json");
  CHECK(p.best_read_gb_s() == 1000);
  CHECK(p.best_tflops() == 500);
  CHECK(p.budget_gib() == 98);
  CHECK_FALSE(p.link_latency_us.has_value());
  j["read_measured_gb_s"] = figure(900);
  j["bf16_measured_tflops"] = figure(400);
  p = parse_node_profile(j.dump(), "n.json");
  CHECK(p.best_read_gb_s() == 900);
  CHECK(p.best_tflops() == 400);
}

TEST_CASE(
    "a figure without a source, of unknown basis or that is not positive is refused by name") {
  Json j = profile();
  j["read_gb_s"].erase("source");
  CHECK(refused(j) == "n.json: read_gb_s: source: is missing");
  j["read_gb_s"]["source"] = "";
  CHECK(has(refused(j), "read_gb_s: source: expected a text that is not empty"));
  j = profile();
  j["memory_gib"]["basis"] = "guess";
  CHECK(has(refused(j), "memory_gib: basis: found guess, expected measured"));
  j = profile();
  j["link_gb_s"]["value"] = 0;
  CHECK(has(refused(j), "link_gb_s: value: expected a number above 0"));
  j["link_gb_s"] = 50;
  CHECK(has(refused(j), "link_gb_s: expected an object"));
}

TEST_CASE("a missing key, a misspelt one and one of another kind are refused by name") {
  Json j = profile();
  j.erase("reserve_gib");
  CHECK(refused(j) == "n.json: reserve_gib: is missing");
  j = profile();
  j["link_latency_ms"] = figure(1);
  CHECK(refused(j) == "n.json: link_latency_ms: is not a key of a node profile");
  j = profile();
  j["memory_gib"]["unit"] = "GB";
  CHECK(has(refused(j), "memory_gib: unit: is not a key"));
  j = profile();
  j["devices"] = 0;
  CHECK(has(refused(j), "devices: expected a whole number from 1"));
  j["devices"] = "8";
  CHECK(has(refused(j), "devices: expected a whole number"));
  j = profile();
  j["hosts"] = 3;
  CHECK(has(refused(j), "hosts: does not divide devices"));
  j = profile();
  j["reserve_gib"] = figure(100);
  CHECK(has(refused(j), "reserve_gib: leaves nothing"));
  CHECK(refusal([] { parse_node_profile("{", "n.json"); }) == "n.json: is not JSON");
  CHECK(refusal([] { parse_node_profile("[1]", "n.json"); }) == "n.json: expected an object");
}

}  // namespace
