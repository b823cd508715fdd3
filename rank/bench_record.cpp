#include "rank/bench_record.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

Json number(double v) {
  constexpr double kExact = 9007199254740992.0;  // above, doubles skip whole numbers
  if (std::floor(v) == v && std::fabs(v) < kExact) return static_cast<std::int64_t>(v);
  return v;
}

}  // namespace

std::string bench_json(const BenchRecord& record) {
  Json j;
  j["command"] = record.command;
  for (const auto& [name, value] : record.texts) j[name] = value;
  for (const auto& [name, value] : record.numbers) j[name] = number(value);
  j["untimed_ids"] = record.untimed_ids;
  j["ids"] = record.ids;
  j["seconds"] = record.seconds;
  j["ranks"] = Json::object();
  for (const auto& [name, values] : record.rank_columns) {
    Json column = Json::array();
    for (const double v : values) column.push_back(number(v));
    j["ranks"][name] = std::move(column);
  }
  for (const BenchTable& t : record.tables) {
    if (!t.in_json) continue;
    Json& table = j[t.name] = Json::object();
    for (const auto& [name, values] : t.texts) table[name] = values;
    for (const auto& [name, values] : t.numbers) {
      Json column = Json::array();
      for (const double v : values) column.push_back(number(v));
      table[name] = std::move(column);
    }
  }
  return j.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace k3
