// The reference's logits and what the sidecars say of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace k3::golden {

struct Sequence {
  std::string name;  // "short", "long"
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> positions;  // of the stored rows
  std::int64_t n_vocab = 0;
  std::vector<float> exact;  // [positions, n_vocab]
  std::vector<float> ggml;   // the same from the quantised run; empty for f32 models
  double exact_max_abs = 0;  // tolerances
  double ggml_mean_kld = 0;
};

struct Greedy {
  std::vector<std::int32_t> prompt;
  std::vector<std::int32_t> ids;  // argmax continuation
  std::vector<double> margins;    // top-1 margin of each step
};

struct Model {
  std::string name;
  std::string path;  // of the first part
  std::vector<Sequence> sequences;
  Greedy greedy;
  double tolerance = 0;  // of the short sequence
};

// Names of all fixture models, sorted.
std::vector<std::string> model_names();
Model load_model(const std::string& name);

// max |a - b|
double max_abs(const std::vector<float>& a, const std::vector<float>& b);
// mean over rows of KLD(reference || run)
double mean_kld(const std::vector<float>& reference, const std::vector<float>& run,
                std::int64_t n_vocab);

}  // namespace k3::golden
