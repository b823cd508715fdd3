#include "rank/report.h"

#include <unistd.h>

#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

namespace k3 {

void describe_process(RankReport& report) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  report.host = host;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) report.rss_bytes = std::stoull(line.substr(6)) * 1024;
    if (line.starts_with("VmHWM:")) report.peak_rss_bytes = std::stoull(line.substr(6)) * 1024;
  }
}

std::vector<std::byte> to_bytes(const RankReport& r) {
  nlohmann::json points = nlohmann::json::array();
  for (const PointStats& p : r.points) points.push_back({p.calls, p.bytes, p.seconds});
  nlohmann::json choices = nlohmann::json::array();
  for (const ChoiceCounts& c : r.choices)
    choices.push_back({c.layer, c.choices, c.changed, c.tokens, c.tokens_moved});
  const nlohmann::json j = {{"rank", r.rank},
                            {"host", r.host},
                            {"device", r.device},
                            {"plan_bytes", r.plan_bytes},
                            {"weight_bytes", r.weight_bytes},
                            {"state_bytes", r.state_bytes},
                            {"work_bytes", r.work_bytes},
                            {"mapped_bytes", r.mapped_bytes},
                            {"priced_bytes", r.priced_bytes},
                            {"taken_bytes", r.taken_bytes},
                            {"rss_bytes", r.rss_bytes},
                            {"peak_rss_bytes", r.peak_rss_bytes},
                            {"load_s", r.load_s},
                            {"choices", choices},
                            {"points", points}};
  const std::string text = j.dump();
  const auto* p = reinterpret_cast<const std::byte*>(text.data());
  return {p, p + text.size()};
}

RankReport report_from_bytes(std::span<const std::byte> bytes) {
  const auto* p = reinterpret_cast<const char*>(bytes.data());
  const nlohmann::json j = nlohmann::json::parse(p, p + bytes.size());
  RankReport r;
  j.at("rank").get_to(r.rank);
  j.at("host").get_to(r.host);
  j.at("device").get_to(r.device);
  j.at("plan_bytes").get_to(r.plan_bytes);
  j.at("weight_bytes").get_to(r.weight_bytes);
  j.at("state_bytes").get_to(r.state_bytes);
  j.at("work_bytes").get_to(r.work_bytes);
  j.at("mapped_bytes").get_to(r.mapped_bytes);
  j.at("priced_bytes").get_to(r.priced_bytes);
  j.at("taken_bytes").get_to(r.taken_bytes);
  j.at("rss_bytes").get_to(r.rss_bytes);
  j.at("peak_rss_bytes").get_to(r.peak_rss_bytes);
  j.at("load_s").get_to(r.load_s);
  for (const auto& c : j.at("choices"))
    r.choices.push_back({c.at(0), c.at(1), c.at(2), c.at(3), c.at(4)});
  for (const auto& s : j.at("points")) r.points.push_back({s.at(0), s.at(1), s.at(2)});
  return r;
}

}  // namespace k3
