#include "apps/measured_run.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <regex>
#include <stdexcept>

#include "loader/h5.h"
#include "rank/bench_math.h"
#include "rank/run_log.h"
#include "rank/shapes.h"
#include "rank/synth.h"

namespace k3 {
namespace {

// Files whose tensors no named shape has. The small model's: MXFP4 experts, Q8_0 elsewhere, which are the recipe's types.
constexpr struct {
  const char* fingerprint;
  const char* quant;
} kKnownFiles[] = {{"790ad2ce308a4c59fad12a61297be07b", "UD-Q4_K_XL"}};

std::string option(const h5::Group& bench, const std::string& name, const std::string& otherwise) {
  const std::string key = "option_" + name;
  return bench.has_attribute(key) ? bench.string_attribute(key) : otherwise;
}

std::vector<double> numbers(const h5::Group& root, const char* group, const char* name) {
  if (!root.has(group) || !root.open_group(group).has(name)) return {};
  return root.open_group(group).open(name).read<double>();
}

// A log of synthetic weights says the recipe in its words; a file's is known by the bytes that a named shape has in it.
std::string quant_of(const h5::Group& root, const h5::Group& bench) {
  const std::string synthetic = option(bench, "synthetic", "");
  if (!synthetic.empty()) return parse_synth_model(synthetic).recipe.name();
  for (const auto& known : kKnownFiles) {
    if (bench.string_attribute("fingerprint") == known.fingerprint) return known.quant;
  }
  const std::string model = bench.string_attribute("model_name");
  const auto bytes =
      static_cast<std::uint64_t>(root.open_group("model").int_attribute("tensor_bytes"));
  const auto shapes = shape_names();
  if (std::find(shapes.begin(), shapes.end(), model) != shapes.end()) {
    for (const std::string& name : recipe_names()) {
      std::uint64_t sum = 0;
      for (const TensorInfo& t :
           tensors_of(outline_of(named_shape(model), QuantRecipe::parse(name))))
        sum += t.bytes;
      if (sum == bytes) return name;
    }
  }
  throw std::invalid_argument(
      fmt::format("{} with {} bytes of tensors: no named quantization has as many", model, bytes));
}

std::string node_of(const h5::Group& root, const h5::Group& bench) {
  const auto world = root.int_attribute("world");
  const std::string devices = bench.string_attribute("devices");
  std::string node;
  std::smatch m;
  if (std::regex_search(devices, m, std::regex("cuda \\d+: NVIDIA ([A-Za-z0-9]+)"))) {
    node = fmt::format("{}x{}", world, m[1].str());
  } else if (std::regex_search(devices, m, std::regex("cpu: (\\d+) thread"))) {
    node = fmt::format("{}xcpu-{}t", world, m[1].str());
  } else {
    throw std::invalid_argument("bench: devices: '" + devices +
                                "': expected a CUDA device or a CPU");
  }
  const std::string of = option(bench, "world", "");
  return of.empty() ? node : node + "-part-of-" + of;
}

std::string engine_of(const h5::Group& root, const h5::Group& bench) {
  std::string engine = "k3-" + option(bench, "precision", "exact");
  const bool many = root.int_attribute("world") > 1 && option(bench, "backend", "cpu") == "cuda";
  return many ? engine + "+" + option(bench, "comm", "nccl") : engine;
}

std::string context_of(const h5::Group& bench, const std::string& command) {
  if (command == "load") return "file";
  const std::string depth = option(bench, "depth", "0"), cache = option(bench, "cache", "f16");
  if (command == "decode") return "d" + depth + "-" + cache;
  return fmt::format("p{}-d{}-{}", option(bench, "tokens", "0"), depth, cache);
}

void compare(MeasuredRun& run, const char* what, double found, double claimed) {
  if (found + 0.5 < claimed)
    run.faults.push_back(fmt::format("{}: {:g} found, {:g} claimed", what, found, claimed));
}

// Tokens and times in the log against what was asked for.
void check_work(MeasuredRun& run, const h5::Group& root, const h5::Group& bench,
                const std::string& command) {
  const auto seconds = numbers(root, "bench", "seconds"), ids = numbers(root, "bench", "id");
  const auto phase = numbers(root, "steps", "phase"), n_tok = numbers(root, "steps", "n_tok");
  double prefilled = 0, decoded = 0;
  for (std::size_t i = 0; i < std::min(phase.size(), n_tok.size()); ++i)
    (phase[i] == 0 ? prefilled : decoded) += n_tok[i];
  const double tokens = std::stod(option(bench, "tokens", "0")),
               warmup = std::stod(option(bench, "warmup", "0"));
  const bool decode = command == "decode";
  const double repeats = decode ? tokens : std::stod(option(bench, "repeat", "0"));
  compare(run, "times", static_cast<double>(seconds.size()), repeats);
  compare(run, "ids", static_cast<double>(ids.size()), repeats);
  if (decode) compare(run, "decoded tokens", decoded, tokens);
  if (!decode) compare(run, "prefilled tokens", prefilled, tokens * (repeats + warmup));
  if (decode && bench.string_attribute("state").find("a real prefill") == 0) {
    compare(run, "tokens prefilled before", prefilled, std::stod(option(bench, "depth", "0")));
  }
  if (bench.string_attribute("clocks") != "agree")
    run.faults.push_back("the clocks inside and outside disagree");
  if (seconds.empty()) return;
  std::vector<double> values;
  for (const double s : seconds) values.push_back(decode ? 1e3 * s : tokens / s);
  const double median = spread_of(values).median;
  if (std::abs(median - run.value) > 1e-6 * std::abs(median)) {
    run.faults.push_back(
        fmt::format("median: {:g} claimed, the samples have {:g}", run.value, median));
  }
}

// Of one step, not of the traced steps together: every step embeds once.
std::vector<std::pair<std::string, double>> phases_of(const h5::Group& bench) {
  std::vector<std::pair<std::string, double>> out;
  if (!bench.has("phases")) return out;
  const h5::Group g = bench.open_group("phases");
  const auto names = g.open("name").read<std::string>();
  const auto calls = g.open("calls").read<double>(), ms = g.open("total_ms").read<double>();
  const double steps = calls.empty() ? 1 : *std::min_element(calls.begin(), calls.end());
  for (std::size_t i = 0; i < std::min(names.size(), ms.size()); ++i)
    out.emplace_back(names[i], ms[i] / steps);
  std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.second > b.second; });
  return out;
}

void read_grade(MeasuredRun& run, const h5::Group& bench) {
  run.grades = true;
  run.grade_passed = bench.string_attribute("verdict") == "passed";
  run.grade_max_kld = bench.double_attribute("max_kld");
  run.grade_min_top1 = bench.double_attribute("min_top1");
}

void read_bench(MeasuredRun& run, const h5::Group& root) {
  const h5::Group bench = root.open_group("bench");
  if (!bench.has_attribute("command")) return;
  const std::string command = bench.string_attribute("command");
  if (command == "gate") return read_grade(run, bench);
  // Prompts that share their beginning are no prefill of so many tokens.
  const bool decode = command == "decode",
             prefill = command == "prefill" && option(bench, "reuse", "no") == "no";
  if ((!decode && !prefill && command != "load") || root.string_attribute("state") != "finished")
    return;
  run.lower_is_better = decode;
  run.value = bench.double_attribute(decode ? "median_ms" : prefill ? "median_tok_s" : "load_gb_s");
  const std::string metric = decode ? "decode_ms" : prefill ? "prefill_tok_s" : "load_gb_s";
  const std::string engine = engine_of(root, bench);
  run.model = bench.string_attribute("model_name");
  run.precision = option(bench, "precision", "exact");
  run.slot = node_of(root, bench) + "/" + bench.string_attribute("model_name") + "/" +
             quant_of(root, bench) + "/" + context_of(bench, command) + "/" + metric + "/" + engine;
  const char* floor = decode ? "floor_ms" : "floor_tok_s";
  if (bench.has_attribute(floor)) run.floor = bench.double_attribute(floor);
  run.phases = phases_of(bench);
  run.exact = engine.rfind("k3-exact", 0) == 0;
  run.checked = bench.has_attribute("check_top1");
  if (run.checked) {
    run.top1 = bench.double_attribute("check_top1");
    run.kld = bench.double_attribute("check_kld_mean");
    run.compared = bench.double_attribute("check_n");
    run.replayed = bench.double_attribute("check_replayed_equal");
  }
  if (command != "load") check_work(run, root, bench, command);
}

}  // namespace

MeasuredRun read_measured(const std::string& folder, const std::string& file) {
  const std::string path = folder + "/" + file;
  const h5::File log = h5::File::open(path);
  const h5::Group root = log.root();
  if (!root.has_attribute("schema") || root.string_attribute("schema") != kRunSchema) {
    throw std::invalid_argument(path + ": is no log of a run; expected the schema " + kRunSchema);
  }
  MeasuredRun run;
  run.file = file;
  if (root.has_attribute("program")) run.program = root.string_attribute("program");
  run.started = root.string_attribute("started");
  run.commit = root.open_group("build").string_attribute("commit");
  if (root.has("model")) run.model = root.open_group("model").string_attribute("name");
  if (root.has("options") && root.open_group("options").has_attribute("precision"))
    run.precision = root.open_group("options").string_attribute("precision");
  try {
    if (root.has("bench")) read_bench(run, root);
  } catch (const std::invalid_argument& e) {
    throw std::invalid_argument(path + ": " + e.what());
  }
  return run;
}

}  // namespace k3
