#include "rank/bench_math.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "loader/parts.h"
#include "rank/bench_record.h"
#include "rank/shapes.h"
#include "tests/rank/outline.h"

namespace {

using namespace k3;
using test::Outline;

Layout layout(int tp, int pp) {
  Layout l;
  l.tp = tp;
  l.pp = pp;
  return l;
}

TEST_CASE("a percentile lies on the line between its neighbours") {
  const std::vector<double> five{1, 2, 3, 4, 10};
  CHECK(percentile(five, 0) == 1);
  CHECK(percentile(five, 0.5) == 3);
  CHECK(percentile(five, 1) == 10);
  CHECK(percentile(five, 0.1) == doctest::Approx(1.4));
  CHECK(percentile(five, 0.9) == doctest::Approx(7.6));  // the nearest value would be 10
  CHECK(percentile(std::vector<double>{7}, 0.9) == 7);
  CHECK_THROWS_AS(percentile({}, 0.5), std::invalid_argument);
  CHECK_THROWS_AS(percentile(five, 1.5), std::invalid_argument);
}

TEST_CASE(
    "a spread does not depend on the order, and one slow token moves the mean but not the median") {
  const Spread s = spread_of(std::vector<double>{3, 1, 100, 2, 4});
  CHECK(s.n == 5);
  CHECK(s.median == 3);
  CHECK(s.mean == 22);
  CHECK(s.p10 == doctest::Approx(1.4));
  CHECK(s.p90 == doctest::Approx(61.6));
  CHECK_THROWS_AS(spread_of(std::vector<double>{}), std::invalid_argument);
  CHECK_THROWS_AS(spread_of(std::vector<double>{1, std::nan("")}), std::invalid_argument);
}

TEST_CASE(
    "seeded ids are the same for the same seed, others for another, and within the vocabulary") {
  const std::vector<std::int32_t> a = seeded_ids(1000, 300, 7);
  CHECK(a == seeded_ids(1000, 300, 7));
  CHECK(a != seeded_ids(1000, 300, 8));
  CHECK(std::all_of(a.begin(), a.end(), [](std::int32_t id) { return id >= 0 && id < 300; }));
  CHECK(std::set<std::int32_t>(a.begin(), a.end()).size() > 250);
  CHECK(seeded_ids(10, 300, 7) == std::vector<std::int32_t>(a.begin(), a.begin() + 10));
}

TEST_CASE("a token of the real shape reads what the model's description says") {
  Outline o("k3");
  const TokenBytes one = token_bytes(o.plan(), 0, 131072, CacheType::kF16);
  CHECK(one.weights == doctest::Approx(70.3e9).epsilon(0.005));
  CHECK(one.mla_rows == doctest::Approx(3.62e9).epsilon(0.005));
  // 69 KDA layers of 96 heads: a state of 128 x 128 and three inputs of q, k and v; read and written, f32.
  CHECK(one.kda_state == 69.0 * 96 * (128 * 128 + 3 * 3 * 128) * 4 * 2);
  // Wrong variants that this must tell apart: every expert read, the whole embedding read, f32 rows.
  CHECK(token_bytes(o.plan(), 0, 131072, CacheType::kF32).mla_rows == 2 * one.mla_rows);
}

TEST_CASE(
    "weights of a token are the plan's, less the experts that are not chosen and all rows but "
    "one") {
  Outline o("k3-8l");
  const Plan plan = o.plan();
  const ModelConfig& c = plan.config();
  double all = 0, experts = 0;
  for (const PlannedTensor& t : plan.tensors()) {
    all += static_cast<double>(plan.band_bytes(t, 0));
    if (t.role == Role::kExpertGate || t.role == Role::kExpertUp || t.role == Role::kExpertDown)
      experts += static_cast<double>(plan.band_bytes(t, 0));
  }
  const auto embd = static_cast<double>(plan.band_bytes(*plan.find(Role::kTokenEmbd), 0));
  const double used = static_cast<double>(c.n_expert_used) / static_cast<double>(c.n_expert);
  const double expected = all - experts * (1 - used) - embd + embd / static_cast<double>(c.n_vocab);
  CHECK(token_bytes(plan, 0, 1, CacheType::kF32).weights == doctest::Approx(expected));
}

TEST_CASE("tensor-parallel ranks move a token's bytes side by side, stages one behind the other") {
  Outline o("k3-8l");
  const double whole = serial_bytes(o.plan(), 128, CacheType::kF16);
  CHECK(whole == token_bytes(o.plan(), 0, 128, CacheType::kF16).total());
  CHECK(serial_bytes(o.plan(layout(1, 2)), 128, CacheType::kF16) == doctest::Approx(whole));
  const double two = serial_bytes(o.plan(layout(2, 1)), 128, CacheType::kF16);
  CHECK(two > 0.5 * whole);  // what is on every rank is read by every rank
  CHECK(two < 0.52 * whole);
  CHECK(floor_ms(4.41e9, 4410) == doctest::Approx(1.0));
}

TEST_CASE("two clocks agree when the inner one is a little shorter, never when it is longer") {
  CHECK(clocks_agree(0.98, 1.0, 0.05));
  CHECK(clocks_agree(1.0, 1.0, 0.05));
  CHECK_FALSE(clocks_agree(0.9, 1.0, 0.05));   // something untimed went on
  CHECK_FALSE(clocks_agree(1.01, 1.0, 0.05));  // more time than there was
}

TEST_CASE("a rank's extents hold each byte of its bands once, and together all tensor data") {
  const ModelFile file = ModelFile::open(K3_NANO_PATH);
  std::vector<std::string> dialects;
  const ModelConfig config =
      read_model_config(file.metadata(), file.tensors(), K3_NANO_PATH, dialects);
  for (const Layout& l : {layout(1, 1), layout(2, 1), layout(3, 1), layout(1, 2)}) {
    CAPTURE(l.tp);
    const Plan plan = Plan::make(config, file.tensors(), l, K3_NANO_PATH);
    for (int rank = 0; rank < l.world(); ++rank) {
      std::uint64_t planned = 0, found = 0, loose = 0, end = 0;
      for (const PlannedTensor& t : plan.tensors()) planned += plan.band_bytes(t, rank);
      for (const FileExtent& e : file_extents(plan, file, rank, 0)) {
        CHECK(e.begin >= end);
        end = e.begin + e.bytes;
        found += e.bytes;
      }
      CHECK(found == planned);
      for (const FileExtent& e : file_extents(plan, file, rank)) loose += e.bytes;
      CHECK(loose >= planned);
      CHECK(loose <= file.bytes());
    }
  }
}

TEST_CASE("cutting extents loses no byte and leaves no piece too long") {
  const std::vector<FileExtent> extents{{0, 5, 10}, {1, 100, 3}, {1, 200, 8}};
  const std::vector<FileExtent> pieces = cut_extents(extents, 4);
  REQUIRE(pieces.size() == 6);
  CHECK(pieces[2].begin == 13);
  CHECK(pieces[2].bytes == 2);
  CHECK(pieces[5].part == 1);
  CHECK(pieces[5].begin == 204);
  CHECK(pieces[5].bytes == 4);
}

TEST_CASE("a record is one line of JSON, whatever bytes its texts hold") {
  BenchRecord r;
  r.command = "decode";
  r.text("model", "a\nb\xff");
  r.number("n", 128);
  r.number("median_ms", 1.5);
  r.ids = {1, 2};
  r.seconds = {0.25, 0.5};
  r.column("load_s", {1, 2.5});
  const std::string line = bench_json(r);
  CHECK(line.find('\n') == std::string::npos);
  CHECK(line.find("\"n\":128,") != std::string::npos);  // not 128.0
  const auto j = nlohmann::json::parse(line);
  CHECK(j["median_ms"] == 1.5);
  CHECK(j["ids"] == std::vector<int>{1, 2});
  CHECK(j["ranks"]["load_s"][1] == 2.5);
}

Plan real_plan(int tp) {
  const k3::ModelOutline outline =
      k3::outline_of(k3::named_shape("k3-full"), k3::QuantRecipe::parse("UD-IQ1_S"));
  std::vector<std::string> dialects;
  const auto infos = k3::tensors_of(outline);
  return Plan::make(k3::read_model_config(k3::metadata_of(outline), infos, "k3", dialects), infos,
                    layout(tp, 1), "k3");
}

TEST_CASE("the real model's operations are those of its description, and ranks share them") {
  const k3::TokenFlops whole = k3::token_flops(real_plan(1), 0);
  // 205 GFLOP a token without attention; at 131072 rows of prompt, 65536 in the mean, 97 more.
  CHECK((whole.layers + whole.head) / 1e9 == doctest::Approx(205).epsilon(0.02));
  CHECK(whole.per_row * 65536 / 1e9 == doctest::Approx(97).epsilon(0.02));
  const Plan plan = real_plan(8);
  double layers = 0, head = 0, rows = 0;
  for (int r = 0; r < 8; ++r) {
    const k3::TokenFlops part = k3::token_flops(plan, r);
    layers += part.layers;
    head += part.head;
    rows += part.per_row;
  }
  CHECK(head == doctest::Approx(whole.head));
  CHECK(rows == doctest::Approx(whole.per_row));
  CHECK(layers >= whole.layers);
  CHECK(layers < 1.1 * whole.layers);  // small matrices are on every rank
}

TEST_CASE("a long prompt's floor is arithmetic, a short one's is bytes, and chunks add reads") {
  const Plan plan = real_plan(8);
  const auto floor = [&](std::int64_t n, std::int64_t chunk) {
    return k3::prefill_floor(plan, 0, 0, n, chunk, CacheType::kF16, 4410, 790);
  };
  const k3::PrefillFloor large = floor(32768, 8192), small = floor(16, 16);
  CHECK(large.seconds == doctest::Approx(large.flops / 790e12).epsilon(0.01));
  CHECK(small.seconds == doctest::Approx(small.bytes / 4410e9).epsilon(0.01));
  // The wall of eight devices at 32k: 27 500 tok/s in the mean over the ranks.
  CHECK(32768 / large.seconds == doctest::Approx(27500).epsilon(0.05));
  CHECK(floor(4096, 512).bytes > 4 * floor(4096, 4096).bytes);
  CHECK(floor(4096, 512).flops < 1.0001 * floor(4096, 4096).flops);
}

TEST_CASE("spans of one name are added up, the longest first") {
  const std::vector<k3::TimeSpan> spans{{"kda", 0, 0, 1}, {"mla", 1, 1, 5}, {"kda", 2, 6, 2}};
  const std::vector<k3::PhaseTotal> totals = k3::phase_totals(spans);
  REQUIRE(totals.size() == 2);
  CHECK(totals[0].name == "mla");
  CHECK(totals[1].calls == 2);
  CHECK(totals[1].seconds == 3);
}

TEST_CASE("a record's tables are lists under their names, those of the log alone left out") {
  BenchRecord r;
  k3::BenchTable shown, hidden;
  shown.name = "phases";
  hidden.name = "timeline";
  hidden.in_json = false;
  for (const double v : {1.0, 2.5}) {
    shown.text("name", "kda");
    shown.number("ms", v);
    hidden.number("ms", v);
  }
  r.tables = {shown, hidden};
  const auto j = nlohmann::json::parse(bench_json(r));
  CHECK(j["phases"]["name"] == std::vector<std::string>{"kda", "kda"});
  CHECK(j["phases"]["ms"][1] == 2.5);
  CHECK_FALSE(j.contains("timeline"));
}

}  // namespace
