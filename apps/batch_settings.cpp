#include "apps/batch_settings.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>

#include "apps/job.h"
#include "loader/atomic_file.h"
#include "rank/json_text.h"

namespace k3 {
namespace {

// What a session has read, in one word; nothing where there is none.
std::string session_name(const std::vector<std::int32_t>& ids) {
  if (ids.empty()) return "";
  const std::string_view bytes(reinterpret_cast<const char*>(ids.data()),
                               ids.size() * sizeof(ids[0]));
  return fmt::format("{:016x}", line_hash(bytes));
}

}  // namespace

NamedTexts batch_settings(const RunConfig& config, const BatchDefaults& defaults,
                          const std::string& fingerprint) {
  constexpr std::array kAlways = {
      "predict", "control-tokens",     "ignore-eos",       "temp", "top-k", "top-p",
      "min-p",   "repetition-penalty", "presence-penalty", "seed"};
  constexpr std::array kToTheBit = {"tp",      "pp",        "policy", "expert-groups",
                                    "backend", "precision", "cache"};
  NamedTexts out = {{"model fingerprint", fingerprint},
                    {"ctx", fmt::format("{}", defaults.n_ctx)},
                    {"thinking-effort",
                     defaults.effort ? std::string(thinking_effort_name(*defaults.effort)) : ""},
                    {"session", session_name(defaults.before)},
                    {"reproducible", config.reproducible ? "yes" : "no"}};
  const auto is_one_of = [](const auto& list, const std::string& name) {
    return std::find(list.begin(), list.end(), std::string_view(name)) != list.end();
  };
  for (const auto& [name, value] : describe(config)) {
    if (is_one_of(kAlways, name) || (config.reproducible && is_one_of(kToTheBit, name))) {
      out.emplace_back(name, value);
    }
  }
  return out;
}

void keep_settings(const std::string& path, const NamedTexts& settings, bool resumed) {
  std::error_code unknown;
  if (resumed && std::filesystem::exists(path, unknown)) {
    nlohmann::ordered_json before;
    try {
      before = read_json(read_text(path));
    } catch (const std::invalid_argument& e) {
      throw std::invalid_argument(path + ": " + e.what());
    }
    for (const auto& [name, value] : settings) {
      const auto it = before.is_object() ? before.find(name) : before.end();
      if (it == before.end() || *it == value) continue;
      throw std::invalid_argument(
          fmt::format("--resume: {} is '{}', the answers that are there were made with {}", name,
                      value, write_json(*it)));
    }
    return;
  }
  nlohmann::ordered_json j;
  for (const auto& [name, value] : settings) j[name] = value;
  AtomicFile file(path);
  const std::string text = write_json(j) + "\n";
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace k3
