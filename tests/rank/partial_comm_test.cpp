#include "rank/partial_comm.h"

#include <doctest/doctest.h>

#include "comm/thread_comm.h"
#include "tests/support/backends.h"

namespace k3 {
namespace {

std::vector<float> row_of(std::int64_t n, float first) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(first + static_cast<float>(i));
  return v;
}

}  // namespace

TEST_CASE(
    "one rank of eight keeps its sums, finds its own columns in place, and counts every call") {
  run_ranks(1, [](Comm& one) {
    for_each_backend([&](Backend& b) {
      PartialComm comm(one, 5, 8, b);
      CHECK(comm.rank() == 5);
      CHECK(comm.size() == 8);
      const std::vector<float> mine = row_of(6, 100);
      Matrix<float> x(b, 1, 6, mine);
      comm.sum(Point::kFfnOut, x.data(), 6, b.stream());
      CHECK(x.get() == mine);
      for (const std::int64_t n_row : {1, 2}) {
        const std::vector<float> rows = row_of(3 * n_row, 1);
        const Matrix<float> part(b, n_row, 3, rows), all(b, n_row, 24);
        comm.gather_rows(Point::kRouterLatent, part.data(), all.data(),
                         static_cast<std::size_t>(n_row), std::vector<std::size_t>(8, 3),
                         b.stream());
        const std::vector<float> got = all.get();
        for (std::int64_t i = 0; i < n_row * 24; ++i) {
          CHECK(got[static_cast<std::size_t>(i)] ==
                rows[static_cast<std::size_t>(i / 24 * 3 + i % 3)]);
        }
      }
      // Uneven bands: what is there goes in front, the rest stays as it was.
      const std::vector<std::size_t> widths{4, 2, 2, 2, 2, 2, 2, 0};
      const Matrix<float> part(b, 1, 2, {7, 8}), all(b, 1, 16);
      comm.gather_rows(Point::kRouterLatent, part.data(), all.data(), 1, widths, b.stream());
      CHECK(all.get() == std::vector<float>{7, 8, 0, 0, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8});
      CHECK(comm.stats(Point::kFfnOut).calls == 1);
      CHECK(comm.stats(Point::kRouterLatent).calls == 3);
      const auto group = comm.split(0, 5);
      CHECK(group->rank() == 5);
      CHECK(group->size() == 8);
      CHECK(comm.all_gather_bytes(Point::kAgree, {}).size() == 1);
      CHECK_THROWS_AS(PartialComm(one, 8, 8, b), std::invalid_argument);
    });
  });
}

TEST_CASE("two ranks of four really speak: sums of both, both bands in place") {
  run_ranks(2, [](Comm& two) {
    const auto backend = make_cpu_backend(1);
    PartialComm comm(two, 0, 4, *backend);
    const float mine = two.rank() == 0 ? 1 : 2;
    Matrix<float> x(*backend, 1, 2, {mine, mine});
    comm.sum(Point::kFfnOut, x.data(), 2, nullptr);
    CHECK(x.get() == std::vector<float>{3, 3});
    for (const std::int64_t n_row : {1, 2}) {
      const Matrix<float> part(*backend, n_row, 1,
                               std::vector<float>(static_cast<std::size_t>(n_row), mine));
      const Matrix<float> all(*backend, n_row, 4);
      comm.gather_rows(Point::kRouterLatent, part.data(), all.data(),
                       static_cast<std::size_t>(n_row), std::vector<std::size_t>(4, 1), nullptr);
      const std::vector<float> got = all.get();
      for (std::int64_t t = 0; t < n_row; ++t) {
        const float* row = got.data() + 4 * t;
        CHECK(row[0] == 1);
        CHECK(row[1] == 2);
        CHECK(row[2] == mine);
      }
    }
  });
}

}  // namespace k3
