// Files of logits: raw little-endian 32-bit floats, one row of the vocabulary's size after another.
#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "rank/eval.h"

namespace k3 {

// Rows of a file, front to back. Throws std::invalid_argument where there is no file, or not whole rows; std::system_error
// where reading fails.
class RowReader {
 public:
  RowReader(const std::string& path, std::int64_t n_vocab);
  std::int64_t n_row() const { return n_row_; }
  std::span<const float> next();

 private:
  std::string path_;
  std::int64_t n_vocab_;
  std::int64_t n_row_ = 0;
  std::ifstream file_;
  std::vector<float> row_;
};

// Compares rows of a run, as they come, with a reference's.
class RowComparer {
 public:
  // `positions`: of the run's n_run_row rows, rising, one for each row of the reference; empty: all. Throws
  // std::invalid_argument where they do not fit.
  RowComparer(const std::string& reference, std::int64_t n_vocab, std::int64_t n_run_row,
              double margin_tol, std::vector<std::int32_t> positions);
  void add(std::span<const float> row);
  LogitComparison result() const { return comparer_.result(); }

 private:
  RowReader reference_;
  LogitComparer comparer_;
  std::vector<std::int32_t> positions_;
  std::size_t next_ = 0;
  std::int64_t at_ = 0;
};

}  // namespace k3
