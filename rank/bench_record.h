// What a benchmark found, as names and values: one source for its log, its JSON line and its test.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace k3 {

// Columns of equal length.
struct BenchTable {
  std::string name;
  std::vector<std::pair<std::string, std::vector<std::string>>> texts;
  std::vector<std::pair<std::string, std::vector<double>>> numbers;
  bool in_json = true;  // else only in the log

  void text(const std::string& column, std::string value) {
    column_of(texts, column).push_back(std::move(value));
  }
  void number(const std::string& column, double value) {
    column_of(numbers, column).push_back(value);
  }

 private:
  template <class T>
  static std::vector<T>& column_of(std::vector<std::pair<std::string, std::vector<T>>>& all,
                                   const std::string& name) {
    for (auto& [n, values] : all) {
      if (n == name) return values;
    }
    all.emplace_back(name, std::vector<T>());
    return all.back().second;
  }
};

struct BenchRecord {
  std::string command;  // "decode"
  std::vector<std::pair<std::string, std::string>> texts;
  std::vector<std::pair<std::string, double>> numbers;  // unit in the name: "median_ms"
  std::vector<std::int32_t> untimed_ids;                // drawn before the clock ran
  std::vector<std::int32_t> ids;                        // one for each of `seconds`, or none
  std::vector<double> seconds;                          // of each timed token, or repeat
  std::vector<std::pair<std::string, std::vector<double>>> rank_columns;  // one value a rank
  std::vector<BenchTable> tables;

  void text(std::string name, std::string value) {
    texts.emplace_back(std::move(name), std::move(value));
  }
  void number(std::string name, double value) { numbers.emplace_back(std::move(name), value); }
  void column(std::string name, std::vector<double> values) {
    rank_columns.emplace_back(std::move(name), std::move(values));
  }
};

// One JSON object on one line: "command", texts and numbers under their names, "untimed_ids", "ids", "seconds", and
// "ranks": a list for each column; tables under their names likewise. Whole numbers are written as such; bytes that are no UTF-8 are replaced.
std::string bench_json(const BenchRecord& record);

}  // namespace k3
