#include "apps/logit_rows.h"

#include <bit>
#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fmt/core.h>

namespace k3 {
namespace {

std::system_error io_error(const std::string& path) {
  return std::system_error(errno ? errno : EIO, std::generic_category(), path);
}

}  // namespace

RowReader::RowReader(const std::string& path, std::int64_t n_vocab)
    : path_(path), n_vocab_(n_vocab) {
  // What cannot be read here is bad input, as a model is that is not there; a stream would open a folder.
  std::error_code forbidden;  // opening it says so
  const auto kind = std::filesystem::status(path, forbidden).type();
  if (kind == std::filesystem::file_type::not_found) {
    throw std::invalid_argument(path + ": no such file");
  }
  if (!forbidden && kind != std::filesystem::file_type::regular) {
    throw std::invalid_argument(path + ": is no regular file, expected raw floats");
  }
  errno = 0;
  file_.open(path, std::ios::binary | std::ios::ate);
  if (!file_) throw io_error(path);
  const auto bytes = static_cast<std::int64_t>(file_.tellg());
  const std::int64_t row_bytes = n_vocab * static_cast<std::int64_t>(sizeof(float));
  if (bytes == 0 || bytes % row_bytes != 0) {
    throw std::invalid_argument(
        fmt::format("{}: {} bytes, not a multiple of a row of {} floats ({} bytes)", path, bytes,
                    n_vocab, row_bytes));
  }
  n_row_ = bytes / row_bytes;
  file_.seekg(0);
  row_.resize(static_cast<std::size_t>(n_vocab));
}

std::span<const float> RowReader::next() {
  static_assert(std::endian::native == std::endian::little, "files are little-endian");
  if (!file_.read(reinterpret_cast<char*>(row_.data()),
                  static_cast<std::streamsize>(row_.size() * sizeof(float)))) {
    throw io_error(path_);
  }
  return row_;
}

RowComparer::RowComparer(const std::string& reference, std::int64_t n_vocab, std::int64_t n_run_row,
                         double margin_tol, std::vector<std::int32_t> positions)
    : reference_(reference, n_vocab),
      comparer_(n_vocab, margin_tol),
      positions_(std::move(positions)) {
  const auto wanted = positions_.empty() ? n_run_row : static_cast<std::int64_t>(positions_.size());
  if (reference_.n_row() != wanted) {
    throw std::invalid_argument(
        fmt::format("{}: {} rows, but {} {}", reference, reference_.n_row(),
                    positions_.empty() ? "the run has" : "--positions names", wanted));
  }
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    if (positions_[i] >= n_run_row || (i > 0 && positions_[i] <= positions_[i - 1])) {
      throw std::invalid_argument(fmt::format(
          "--positions: {} must rise and stay under the run's {} rows", positions_[i], n_run_row));
    }
  }
}

void RowComparer::add(std::span<const float> row) {
  const std::int64_t here = at_++;
  if (!positions_.empty()) {
    if (next_ == positions_.size() || positions_[next_] != here) return;
    ++next_;
  }
  comparer_.add(row, reference_.next());
}

}  // namespace k3
