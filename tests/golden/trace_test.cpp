// Every intermediate of the reference's traces, on one rank; on three, those that every rank must hold whole.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "comm/thread_comm.h"
#include "loader/h5.h"
#include "rank/prepare.h"
#include "rank/shard.h"
#include "support/golden.h"

namespace k3 {
namespace {

const std::string kModels = std::string(K3_TEST_DATA) + "/models/";

// Inside one op, where no probe sees them; what the op makes of them is compared.
const std::set<std::string> kUnseen = {"ffn_moe_probs", "ffn_moe_probs_biased", "kda_normed"};
// The same on every rank of a full tensor-parallel layout, once ranks have spoken.
const std::set<std::string> kWhole = {
    "inp_embd",    "res_probs_attn", "attn_norm",        "prefix_sum_attn", "res_probs_ffn",
    "ffn_norm",    "l_out",          "ffn_moe_logits",   "ffn_moe_topk",    "ffn_moe_weights",
    "ffn_moe_out", "ffn_out",        "res_probs_output", "result_norm"};

class Recorder final : public Probe {
 public:
  void see(std::string_view name, int layer, View<const float> v) override { keep(name, layer, v); }
  void see_ids(std::string_view name, int layer, View<const std::int32_t> v) override {
    keep(name, layer, v);
  }
  // The state after the last token, as the reference keeps it: [head, value channel, key channel].
  void keep_states(const Plan& plan, int rank, const State& state) {
    const Band layers = plan.layers(rank);
    for (auto il = static_cast<int>(layers.begin); il < layers.end; ++il) {
      const KdaState& kda = state.kda(il);
      if (kda.s == nullptr) continue;
      std::vector<double>& out = seen["kda_state-" + std::to_string(il)];
      const std::int64_t n = kda.head_dim;
      for (std::int64_t h = 0; h < kda.n_head; ++h) {
        for (std::int64_t value = 0; value < n; ++value) {
          for (std::int64_t key = 0; key < n; ++key) {
            out.push_back(kda.s[(h * n + key) * n + value]);
          }
        }
      }
    }
  }
  std::map<std::string, std::vector<double>> seen;

 private:
  template <class T>
  void keep(std::string_view name, int layer, View<const T> v) {
    std::vector<double>& out =
        seen[std::string(name) + (layer < 0 ? "" : "-" + std::to_string(layer))];
    for (std::int64_t r = 0; r < v.rows; ++r) out.insert(out.end(), v.row(r), v.row(r) + v.cols);
  }
};

struct Trace {
  h5::File file;
  nlohmann::json limits;  // max_abs_vs_float64 by array name
  std::vector<std::int32_t> ids;
};

Trace open_trace(const std::string& model) {
  std::ifstream in(kModels + model + ".json");
  const nlohmann::json j = nlohmann::json::parse(in).at("trace");
  return {h5::File::open(kModels + model + ".trace.h5"), j.at("max_abs_vs_float64"), j.at("ids")};
}

std::string base_name(const std::string& array) { return array.substr(0, array.find('-')); }

// 5 times the reference's own float32 error, at least 1e-5 of the array's largest value.
double tolerance(const Trace& t, const std::string& name, const std::vector<double>& expected) {
  double largest = 0;
  for (const double v : expected) largest = std::max(largest, std::abs(v));
  return std::max(5 * t.limits.at(base_name(name)).get<double>(), 1e-5 * largest);
}

double worst(const std::vector<double>& a, const std::vector<double>& b) {
  double w = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    if (!(d <= w)) w = d;
  }
  return w;
}

// One step of the trace's ids on this rank, everything recorded.
void record(const std::string& model, const Trace& trace, Comm& world, const Layout& layout,
            Recorder& recorder) {
  RunConfig c;
  c.model = golden::load_model(model).path;
  c.layout = layout;
  c.n_ctx = static_cast<std::int64_t>(trace.ids.size());
  const auto backend = make_cpu_backend(1);
  Prepared p = prepare(c, world, *backend);
  Shard shard(*p.plan, *p.source, *backend, world, shard_options(p.config), {}, p.warnings);
  shard.forward().set_probe(&recorder);
  shard.extend(0, trace.ids, false);
  shard.logits({0, static_cast<std::int64_t>(trace.ids.size())});
  recorder.keep_states(*p.plan, world.rank(), shard.state());
}

void compare(const Trace& trace, const Recorder& recorder, bool whole_only) {
  std::size_t compared = 0;
  for (const std::string& name : trace.file.root().names()) {
    const std::string base = base_name(name);
    if (name == "ids" || kUnseen.contains(base) || (whole_only && !kWhole.contains(base))) continue;
    const auto seen = recorder.seen.find(name);
    CAPTURE(name);
    REQUIRE(seen != recorder.seen.end());
    const std::vector<double> expected = trace.file.root().open(name).read<double>();
    REQUIRE(seen->second.size() == expected.size());
    CHECK(worst(seen->second, expected) <= tolerance(trace, name, expected));
    ++compared;
  }
  CHECK(compared > (whole_only ? 40u : 60u));
}

}  // namespace

TEST_CASE("every traced intermediate is the reference's") {
  for (const char* model : {"k3-deep-f32", "k3-realdims-bf16"}) {
    CAPTURE(model);
    const Trace trace = open_trace(model);
    Recorder recorder;
    run_ranks(1, [&](Comm& world) { record(model, trace, world, {}, recorder); });
    compare(trace, recorder, false);
  }
}

TEST_CASE("on three ranks what every rank must hold whole is the reference's on each") {
  const Trace trace = open_trace("k3-deep-f32");
  Layout layout;
  layout.tp = 3;
  std::vector<Recorder> recorders(3);
  run_ranks(3, [&](Comm& world) {
    record("k3-deep-f32", trace, world, layout, recorders[static_cast<std::size_t>(world.rank())]);
  });
  // ffn_out is closed after the sum, ffn_moe_out before the norm and after the sum.
  for (const Recorder& recorder : recorders) compare(trace, recorder, true);
}

TEST_CASE("the comparison can fail: one head's decay at the wrong place is seen") {
  const Trace trace = open_trace("k3-deep-f32");
  Recorder recorder;
  run_ranks(1, [&](Comm& world) { record("k3-deep-f32", trace, world, {}, recorder); });
  std::vector<double> g = recorder.seen.at("kda_g1-0");
  std::swap(g[0], g[1]);
  CHECK(worst(g, trace.file.root().open("kda_g1-0").read<double>()) >
        tolerance(trace, "kda_g1-0", g));
}

}  // namespace k3
