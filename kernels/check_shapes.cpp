#include "kernels/check_shapes.h"

#include <stdexcept>
#include <string>

namespace k3 {
namespace {

void add_shape(std::string& line, std::int64_t rows, std::int64_t cols) {
  line += "[";
  line += std::to_string(rows);
  line += ", ";
  line += std::to_string(cols);
  line += "]";
}

}  // namespace

void check_shapes(const MatmulJob& j) {
  const Weight& w = *j.w;
  if (j.x.cols == w.n_in && j.y.cols == w.n_out && j.x.rows == j.y.rows) return;
  std::string line = "matmul: y ";
  add_shape(line, j.y.rows, j.y.cols);
  line += " = x ";
  add_shape(line, j.x.rows, j.x.cols);
  line += " . w ";
  add_shape(line, w.n_out, w.n_in);
  line += "^T does not fit";
  throw std::invalid_argument(line);
}

}  // namespace k3
