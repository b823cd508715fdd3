#include "support/golden.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "rank/eval.h"

namespace k3::golden {
namespace {

const std::string kModels = std::string(K3_TEST_DATA) + "/models/";

std::vector<float> read_floats(const std::string& name) {
  std::ifstream in(kModels + name, std::ios::binary | std::ios::ate);
  if (!in) throw std::invalid_argument(kModels + name + ": cannot be opened");
  std::vector<float> values(static_cast<std::size_t>(in.tellg()) / sizeof(float));
  in.seekg(0);
  in.read(reinterpret_cast<char*>(values.data()),
          static_cast<std::streamsize>(values.size() * sizeof(float)));
  return values;
}

Sequence read_sequence(const std::string& name, const nlohmann::json& j) {
  Sequence s;
  s.name = name;
  j.at("ids").get_to(s.ids);
  j.at("positions").get_to(s.positions);
  s.n_vocab = j.at("shape").at(1);
  s.exact = read_floats(j.at("exact"));
  s.exact_max_abs = j.at("tolerance").at("suggested_exact_max_abs");
  if (j.contains("ggml")) {
    s.ggml = read_floats(j.at("ggml"));
    s.ggml_mean_kld = j.at("tolerance").at("suggested_ggml_mean_kld");
  }
  if (s.exact.size() != s.positions.size() * static_cast<std::size_t>(s.n_vocab)) {
    throw std::invalid_argument(name + ": golden has another size than its sidecar says");
  }
  return s;
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kModels)) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Model load_model(const std::string& name) {
  std::ifstream in(kModels + name + ".json");
  if (!in) throw std::invalid_argument(kModels + name + ".json: cannot be opened");
  const nlohmann::json j = nlohmann::json::parse(in);
  Model m;
  m.name = name;
  m.path = kModels + j.at("files").at(0).at("name").get<std::string>();
  for (const auto& [key, value] : j.at("sequences").items())
    m.sequences.push_back(read_sequence(key, value));
  j.at("greedy").at("prompt").get_to(m.greedy.prompt);
  j.at("greedy").at("continuation").get_to(m.greedy.ids);
  j.at("greedy").at("top1_margins").get_to(m.greedy.margins);
  m.tolerance = j.at("sequences").at("short").at("tolerance").at("suggested_exact_max_abs");
  return m;
}

double max_abs(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) throw std::invalid_argument("max_abs: other sizes");
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(static_cast<double>(a[i]) - b[i]);
    if (!(d <= worst)) worst = d;  // a NaN is the worst there is
  }
  return worst;
}

double mean_kld(const std::vector<float>& reference, const std::vector<float>& run,
                std::int64_t n_vocab) {
  LogitComparer c(n_vocab);
  c.add(run, reference);
  return c.result().kld_mean;
}

}  // namespace k3::golden
