// What the gate looks at and how it judges; through an engine: tests/apps/eval_gate.sh.
#include "rank/gate.h"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>

namespace k3 {
namespace {

GateRow good_row(bool held) {
  GateRow row;
  row.length = 512;
  row.held = held;
  row.decode = true;
  row.rows.kld_mean = 1e-4;
  row.rows.top1 = 0.995;
  ChoiceCounts first, second;
  first.layer = 1;
  second.layer = 5;
  first.choices = second.choices = 1000;
  second.changed = 50;
  row.choices = {first, second};
  return row;
}

}  // namespace

TEST_CASE("rows of lengths that lie close are kept once, and found by position") {
  GateOptions o;
  o.lengths = {4, 20, 100};
  o.n_before = 8;
  o.n_after = 16;
  GateReference reference(o, 2);
  CHECK(reference.windows() == std::vector<Band>{{0, 36}, {92, 116}});
  for (const Band& w : reference.windows()) {
    for (std::int64_t p = w.begin; p < w.end; ++p) {
      const float row[] = {static_cast<float>(p), -static_cast<float>(p)};
      reference.append(row);
    }
  }
  for (const Band b :
       {Band{0, 4}, Band{4, 20}, Band{12, 20}, Band{20, 36}, Band{92, 100}, Band{100, 116}}) {
    const std::span<const float> rows = reference.rows(b);
    REQUIRE(std::ssize(rows) == 2 * b.size());
    CHECK(rows.front() == static_cast<float>(b.begin));
    CHECK(rows.back() == -static_cast<float>(b.end - 1));
  }
  CHECK_THROWS_AS(reference.rows({30, 40}), std::logic_error);
  CHECK(ids_needed(o) == 116);
}

TEST_CASE("a row fails by divergence, by tokens, by one layer's choices, and by a NaN") {
  const GateOptions o;
  CHECK(gate_faults(good_row(true), o).empty());
  GateRow row = good_row(true);
  row.rows.kld_mean = 1.1e-3;
  CHECK(gate_faults(row, o) ==
        std::vector<std::string>{"mean KLD 0.0011 (expected 0.001 at most)"});
  row.rows.kld_mean = std::numeric_limits<double>::quiet_NaN();
  CHECK(gate_faults(row, o).size() == 1);
  row = good_row(true);
  row.rows.top1 = 0.98;
  CHECK(gate_faults(row, o) == std::vector<std::string>{"top-1 0.9800 (expected 0.99 at least)"});
  row = good_row(true);
  row.choices[1].changed = 51;  // 2.55 % of all
  CHECK(gate_faults(row, o) ==
        std::vector<std::string>{"layer 5 would have chosen 0.0510 of its experts "
                                 "otherwise (expected 0.05 at most)"});
}

TEST_CASE("free rows are not judged, and one prefill's few rows not by their share of tokens") {
  const GateOptions o;
  GateRow row = good_row(false);
  row.rows.kld_mean = row.rows.top1 = 0.5;
  row.choices[0].changed = 900;
  CHECK(gate_faults(row, o).empty());
  row = good_row(true);
  row.rows.top1 = 0.9;
  row.decode = false;
  CHECK(gate_faults(row, o).empty());
  row.length = 0;  // all prefills together
  CHECK(gate_faults(row, o).size() == 1);
}

TEST_CASE("lengths that do not rise and bounds that are none are refused") {
  GateOptions o;
  CHECK_NOTHROW(check(o));
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{}, {0, 4}, {4, 4}, {8, 4}}) {
    o.lengths = lengths;
    CHECK_THROWS_AS(check(o), std::invalid_argument);
  }
  o = {};
  o.n_after = 0;
  CHECK_THROWS_AS(check(o), std::invalid_argument);
  o = {};
  o.min_top1 = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(check(o), std::invalid_argument);
}

}  // namespace k3
