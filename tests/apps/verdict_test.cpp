#include "apps/verdict.h"

#include <algorithm>
#include <fstream>

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/figures.h"
#include "apps/ledger.h"
#include "apps/plots.h"
#include "apps/sealing.h"
#include "loader/h5.h"
#include "tests/loader/gguf_bytes.h"

namespace k3 {
namespace {

using test::has;
using test::refusal_of;
using test::TempDir;

// A log of k3bench decode as far as the reports read it. Its times are all the same.
struct MadeRun {
  std::string commit = "0123456789ab";
  int minute = 0;  // of the day it started at
  double ms = 10;
  int tokens = 4;
  int depth = 128;
  std::string precision = "fast";
  double top1 = 1, kld = 0.01;  // of the check against the exact path; top1 < 0: not checked
  int replayed = 4;             // of 4 ids
  // Lies.
  int times = 4, ids = 4, decoded = 4;
  double median_ms = 0;  // 0: the true one
  std::string clocks = "agree";
  std::string state = "fabricated rows";
  int prefilled = 0;  // tokens of steps that were no decode
  bool prefill =
      false;  // k3bench prefill instead: `times` repeats of `tokens` tokens each, one of them before
  bool reuse = false;
  int world = 1;
  std::string comm = "peer";

  void write(const std::string& path) const {
    h5::File file = h5::File::create(path);
    h5::Group root = file.root();
    root.set("schema", "k3-run");
    root.set("state", "finished");
    root.set("started", fmt::format("2026-01-01T00:{:02}:00Z", minute));
    root.set("world", world);
    root.group("build").set("commit", commit);
    std::vector<std::int64_t> phase(static_cast<std::size_t>(decoded), 1), n_tok = phase;
    phase.push_back(0), n_tok.push_back(prefilled);
    root.group("steps").write<std::int64_t>("phase", phase);
    root.group("steps").write<std::int64_t>("n_tok", n_tok);
    h5::Group bench = root.group("bench");
    bench.write<double>("seconds", std::vector<double>(static_cast<std::size_t>(times), ms / 1e3));
    bench.write<std::int64_t>("id", std::vector<std::int64_t>(static_cast<std::size_t>(ids), 7));
    bench.set("median_ms", median_ms > 0 ? median_ms : ms);
    bench.set("median_tok_s", 1e3 * tokens / ms);
    bench.set("clocks", clocks);
    for (const auto& [name, text] : std::vector<std::pair<std::string, std::string>>{
             {"command", prefill ? "prefill" : "decode"},
             {"commit", commit},
             {"model_name", "k3-8l"},
             {"devices", "cuda 0: NVIDIA H200"},
             {"state", state},
             {"option_synthetic", "k3-8l"},
             {"option_depth", std::to_string(depth)},
             {"option_cache", "f16"},
             {"option_precision", precision},
             {"option_reuse", reuse ? "yes" : "no"},
             {"option_backend", "cuda"},
             {"option_comm", comm},
             {"option_repeat", std::to_string(times)},
             {"option_warmup", "1"},
             {"option_tokens", std::to_string(tokens)}})
      bench.set(name, text);
    if (top1 < 0) return;
    bench.set("check_top1", top1);
    bench.set("check_kld_mean", kld);
    bench.set("check_n", 4.0);
    bench.set("check_replayed_equal", static_cast<double>(replayed));
  }
};

// A log of k3eval gate.
struct MadeGrade {
  std::string commit = "0123456789ab", model = "k3-8l", precision = "fast", verdict = "passed";
  double max_kld = 0.05, min_top1 = 0.95;

  void write(const std::string& path) const {
    h5::File file = h5::File::create(path);
    h5::Group root = file.root();
    root.set("schema", "k3-run");
    root.set("started", "2026-01-01T00:00:00Z");
    root.group("build").set("commit", commit);
    root.group("model").set("name", model);
    root.group("options").set("precision", precision);
    h5::Group bench = root.group("bench");
    bench.set("command", "gate");
    bench.set("verdict", verdict);
    bench.set("max_kld", max_kld);
    bench.set("min_top1", min_top1);
  }
};

nlohmann::json judged(const std::string& path) {
  const std::string text = verdict(path);
  const std::size_t at = text.find("RESULT_JSON ");
  REQUIRE(at != std::string::npos);
  CHECK(text.find("RESULT_JSON ", at + 1) == std::string::npos);
  return nlohmann::json::parse(text.substr(at + 12));
}

// The verdict of a run of `now` after one of 10 ms.
nlohmann::json after_ten(MadeRun now) {
  const TempDir dir;
  MadeRun{}.write(dir / "before.h5");
  now.minute = 1;
  now.write(dir / "now.h5");
  return judged(dir / "now.h5");
}

MadeRun of_ms(double ms) {
  MadeRun r;
  r.ms = ms;
  return r;
}

}  // namespace

TEST_CASE("a tier is the smaller gain's, and noise has none") {
  const auto tier = [](double ms) { return after_ten(of_ms(ms)).at("tier").get<std::string>(); };
  CHECK(tier(10.0) == "none");
  CHECK(tier(9.81) == "none");  // 1.9 %
  CHECK(tier(9.79) == "XS");
  CHECK(tier(9.5) == "S");
  CHECK(tier(9.05) == "M");
  CHECK(tier(7.9) == "L");
  CHECK(tier(6.6) == "XL");
  CHECK(tier(11.0) == "none");
  CHECK(after_ten(of_ms(9.9)).at("significant") == false);
  CHECK(after_ten(of_ms(10.3)).at("significant") == true);
}

TEST_CASE("a run is held to the frontier and not only to the run before it") {
  const TempDir dir;
  MadeRun best = of_ms(5), slow = of_ms(10), now = of_ms(5.2);
  slow.minute = 1, now.minute = 2;
  best.write(dir / "best.h5"), slow.write(dir / "slow.h5"), now.write(dir / "now.h5");
  const auto j = judged(dir / "now.h5");
  CHECK(j.at("gain_over_reference").get<double>() > 0.9);
  CHECK(j.at("gain_over_frontier").get<double>() < 0);
  CHECK(j.at("tier") == "none");
}

TEST_CASE("no gain counts that does not pass the gate") {
  const auto refused = [](const char* words, const auto& change) {
    MadeRun r = of_ms(5);
    change(r);
    const auto j = after_ten(r);
    CHECK_MESSAGE(has(j.at("gate").get<std::string>(), words), j.dump());
    CHECK(j.at("tier") == "none");
    CHECK(j.at("gain_over_reference").get<double>() > 0.9);
  };
  CHECK(after_ten(of_ms(5)).at("tier") == "XL");
  refused("failed: top-1 0.940", [](MadeRun& r) { r.top1 = 0.94; });
  refused("KLD 0.06", [](MadeRun& r) { r.kld = 0.06; });
  refused("3 of 4 ids", [](MadeRun& r) { r.replayed = 3; });
  refused("not checked", [](MadeRun& r) { r.top1 = -1; });
  refused("times: 3 found, 4 claimed", [](MadeRun& r) { r.times = 3; });
  refused("ids: 3 found, 4 claimed", [](MadeRun& r) { r.ids = 3; });
  refused("decoded tokens: 3 found, 4 claimed", [](MadeRun& r) { r.decoded = 3; });
  refused("clocks", [](MadeRun& r) { r.clocks = "disagree"; });
}

TEST_CASE("a prompt that was not read whole is a fault") {
  const auto gate = [](MadeRun r, int prefilled) {
    r.prefilled = prefilled;
    return after_ten(r).at("gate").get<std::string>();
  };
  MadeRun deep;
  deep.state = "a real prefill of seeded ids";
  CHECK(gate(deep, 128) == "passed");
  CHECK(has(gate(deep, 127), "tokens prefilled before: 127 found, 128 claimed"));
  MadeRun prompt;
  prompt.prefill = true;
  CHECK(gate(prompt, 20) == "passed");  // four repeats and one to warm up, of 4 tokens each
  CHECK(has(gate(prompt, 19), "prefilled tokens: 19 found, 20 claimed"));
}

TEST_CASE("a run that is not the one that was sealed has no tier") {
  const TempDir dir;
  MadeRun now = of_ms(8);
  now.minute = 1;
  MadeRun{}.write(dir / "before.h5"), now.write(dir / "now.h5");
  const SigningKey key = SigningKey::generate();
  key.save(dir / "key.pem");
  std::ofstream(dir / "receipt-keys.txt") << key.public_hex() << "\n";
  CHECK(judged(dir / "now.h5").at("receipt") == "none");
  CHECK(seal_runs(dir.path(), dir / "key.pem", "").size() == 2);
  CHECK(check_ledger(dir.path(), "").empty());
  CHECK(judged(dir / "now.h5").at("receipt").get<std::string>().size() == 64);
  CHECK(judged(dir / "now.h5").at("tier") == "L");
  now.ms = 7;
  now.write(dir / "now.h5");
  CHECK(judged(dir / "now.h5").at("receipt") == "broken");
  CHECK(judged(dir / "now.h5").at("tier") == "none");
}

TEST_CASE("scaling divides the speed-up by the number of devices") {
  const TempDir dir;
  MadeRun two = of_ms(6.25);
  two.world = 2;
  MadeRun{}.write(dir / "one.h5"), two.write(dir / "two.h5");
  std::ofstream(dir / "baselines.lock")
      << "peer 4xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/llama.cpp 9 published somebody's page\n";
  const std::string table = scaling_table(read_ledger(dir.path()));
  CHECK(has(table, "| k3-fast | 1xH200 | 10 | – | – | – | one.h5 |"));
  CHECK(has(table, "| k3-fast+peer | 2xH200 | 6.25 | 1.60 | 80 % | – | two.h5 |"));
  CHECK(has(table, "| llama.cpp | 4xH200 | 9 | – | – | – | published: somebody's page |"));
}

TEST_CASE("pictures show the frontier, and the same folder gives the same bytes") {
  const TempDir dir;
  MadeRun deep = of_ms(12.5), better = of_ms(8.25);
  deep.depth = 131072, better.minute = 1;
  MadeRun{}.write(dir / "a.h5"), deep.write(dir / "b.h5"), better.write(dir / "c.h5");
  const Ledger l = read_ledger(dir.path());
  const auto plots = make_plots(l), again = make_plots(l);
  REQUIRE(plots.size() == 2);  // neither two nodes nor a traced run
  CHECK(plots[0].name == "decode-depth.svg");
  CHECK(has(plots[0].svg, "k3-fast  12.50"));
  CHECK(plots[1].name == "ladder.svg");
  CHECK(has(plots[1].svg, ">8.25  0123456<"));
  CHECK(has(plots[1].svg, ">10.00  0123456<"));
  CHECK(plots[0].svg == again[0].svg);
}

TEST_CASE(
    "what was not checked itself is held to the gate's logs of its commit, model and precision") {
  const auto tier = [](const auto& change) {
    const TempDir dir;
    MadeRun now = of_ms(5);
    now.minute = 1, now.top1 = -1;
    MadeRun{}.write(dir / "before.h5"), now.write(dir / "now.h5");
    MadeGrade grade;
    change(grade);
    grade.write(dir / "grade.h5");
    const auto j = judged(dir / "now.h5");
    return j.at("gate").get<std::string>() + ", " + j.at("tier").get<std::string>();
  };
  CHECK(tier([](MadeGrade&) {}) == "passed: k3eval gate, grade.h5, XL");
  CHECK(tier([](MadeGrade& g) { g.verdict = "failed"; }) == "failed: k3eval gate, grade.h5, none");
  CHECK(tier([](MadeGrade& g) { g.commit = "another"; }) == "not checked, none");
  CHECK(tier([](MadeGrade& g) { g.model = "k3-16l"; }) == "not checked, none");
  CHECK(tier([](MadeGrade& g) { g.precision = "exact"; }) == "not checked, none");
  CHECK(tier([](MadeGrade& g) { g.max_kld = 1; }) == "not checked, none");
  CHECK(tier([](MadeGrade& g) { g.min_top1 = 0.5; }) == "not checked, none");
}

TEST_CASE("a log that measures nothing of a slot is read and has none") {
  const TempDir dir;
  MadeRun reuse;
  reuse.prefill = true, reuse.reuse = true;
  reuse.write(dir / "reuse.h5");
  CHECK(read_measured(dir.path(), "reuse.h5").slot.empty());
}

TEST_CASE("a median that its samples do not have is a fault") {
  MadeRun r = of_ms(9);
  r.median_ms = 5;
  CHECK(has(after_ten(r).at("gate").get<std::string>(), "median: 5 claimed, the samples have 9"));
}

TEST_CASE("a run that fails its gate is neither baseline nor frontier") {
  const TempDir dir;
  MadeRun wrong = of_ms(5);
  wrong.minute = 1, wrong.top1 = 0.5;
  MadeRun{}.write(dir / "right.h5"), wrong.write(dir / "wrong.h5");
  const Ledger l = read_ledger(dir.path());
  const Pins pins = pins_of(l, l.runs.at("right.h5").slot);
  REQUIRE(pins.best != nullptr);
  CHECK(pins.best->file == "right.h5");
  CHECK(pins.newest->file == "right.h5");
}

TEST_CASE("a gain that costs a guarded slot more than 1 % has no tier and is not pinned") {
  const auto with_cost = [](double guarded_ms) {
    const TempDir dir;
    const std::string slot = "1xH200/k3-8l/UD-IQ1_S/d{}-f16/decode_ms/k3-fast";
    std::ofstream(dir / "baselines.lock") << "guard " << fmt::format(fmt::runtime(slot), 128) << " "
                                          << fmt::format(fmt::runtime(slot), 4096) << "\n";
    MadeRun deep_before, now = of_ms(5), deep = of_ms(guarded_ms);
    deep_before.depth = deep.depth = 4096;
    now.commit = deep.commit = "fedcba987654";
    now.minute = deep.minute = 1;
    MadeRun{}.write(dir / "before.h5"), deep_before.write(dir / "deep_before.h5");
    now.write(dir / "now.h5"), deep.write(dir / "deep.h5");
    auto j = judged(dir / "now.h5");
    j["pinned"] = pins_of(read_ledger(dir.path()), j.at("slot")).best->file;
    return j;
  };
  CHECK(with_cost(10.05).at("tier") == "XL");
  CHECK(with_cost(10.05).at("pinned") == "now.h5");
  CHECK(with_cost(10.2).at("tier") == "none");
  CHECK(with_cost(10.2).at("pinned") == "before.h5");
  CHECK(has(with_cost(10.2).at("guard").get<std::string>(), "costs 2.0 % at commit fedcba987654"));
}

TEST_CASE("a log that measures no slot is refused") {
  const TempDir dir;
  MadeRun{}.write(dir / "a.h5");
  CHECK(has(refusal_of([&] { verdict(dir / "b.h5"); }), "b.h5: is no log"));
}

TEST_CASE("a slot's name carries all its axes") {
  const auto refused = [](const std::string& name, bool peer = false) {
    return refusal_of([&] { Slot::parse(name, peer); });
  };
  CHECK(refused("1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/k3-fast").empty());
  CHECK(has(refused("1xH200/k3-8l/d128-f16/decode_ms/k3-fast"), "5 parts"));
  CHECK(has(refused("H200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/k3-fast"), "is no node"));
  CHECK(has(refused("1xH200/k3-8l/fast/d128-f16/decode_ms/k3-fast"), "is no quantization"));
  CHECK(has(refused("1xH200/k3-8l/UD-IQ1_S/deep/decode_ms/k3-fast"), "is no context"));
  CHECK(has(refused("1xH200/k3-8l/UD-IQ1_S/d128-f16/speed/k3-fast"), "is no metric"));
  CHECK(
      has(refused("1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/llama.cpp"), "not an engine of ours"));
  CHECK(refused("1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/llama.cpp", true).empty());
  CHECK(has(refused("1xH200/k3-8l/UD-IQ1_S/d128-f16/decode_ms/k3-fast", true), "a peer's engine"));
}

}  // namespace k3
