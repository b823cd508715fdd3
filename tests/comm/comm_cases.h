// What every Comm must do, told once. The file that includes this defines on_ranks(), which runs a
// case on every rank of every world and variant it has; all ranks run the same lines.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"

namespace k3::test {

struct Rig {
  Comm& comm;
  std::size_t max_count;  // largest message a case need try here
  // The address under which data calls know host memory: itself, or a pretended device's.
  std::function<float*(const float*)> device = [](const float* p) { return const_cast<float*>(p); };
};

void on_ranks(const std::function<void(Rig&)>& body);

#define COMM_CASE_2(sentence, name)       \
  static void name(Rig& rig);             \
  TEST_CASE(sentence) { on_ranks(name); } \
  static void name([[maybe_unused]] Rig& rig)
#define COMM_CASE_1(sentence, line) COMM_CASE_2(sentence, comm_case_##line)
#define COMM_CASE_0(sentence, line) COMM_CASE_1(sentence, line)
#define COMM_CASE(sentence) COMM_CASE_0(sentence, __LINE__)

inline std::vector<std::size_t> sizes_up_to(std::size_t max_count) {
  std::vector<std::size_t> sizes{0, 1, 2, 3, 7, 64, 1009, 2048, 2049, 7168, 100003, 1000000};
  std::erase_if(sizes, [&](std::size_t n) { return n > max_count; });
  return sizes;
}

// Values of which a sum depends on the order of its terms: large ones that cancel, and small ones
// that drown in them.
inline float revealing(int rank, std::size_t i) {
  std::uint32_t h =
      static_cast<std::uint32_t>(i) * 2654435761u + static_cast<std::uint32_t>(rank) * 40503u + 1;
  h = (h ^ (h >> 15)) * 2246822519u;
  h ^= h >> 13;
  const float unit = static_cast<float>(h >> 8) / 16777216.0f - 0.5f;
  return std::ldexp(unit, static_cast<int>(h % 40) - 10);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

inline std::span<std::byte> bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}
inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

COMM_CASE("a sum holds every rank's term exactly once, at every size") {
  Comm& comm = rig.comm;
  for (std::size_t n : sizes_up_to(rig.max_count)) {
    std::vector<float> data(n);
    std::vector<float> expected(n);
    for (std::size_t i = 0; i < n; ++i) {
      data[i] = std::ldexp(static_cast<float>(i % 5 + 1), comm.rank());
      expected[i] = static_cast<float>((i % 5 + 1) * ((1u << comm.size()) - 1));
    }
    comm.sum(Point::kAttnOut, rig.device(data.data()), n, nullptr);
    CHECK_MESSAGE(data == expected, "size ", n);
  }
}

COMM_CASE("a sum adds in rank order and gives the bits of plain loops, at every size") {
  Comm& comm = rig.comm;
  for (std::size_t n : sizes_up_to(rig.max_count)) {
    std::vector<float> data(n);
    std::vector<float> expected(n);
    std::vector<float> backwards(n);
    for (std::size_t i = 0; i < n; ++i) {
      data[i] = revealing(comm.rank(), i);
      expected[i] = revealing(0, i);
      backwards[i] = revealing(comm.size() - 1, i);
      for (int r = 1; r < comm.size(); ++r) expected[i] += revealing(r, i);
      for (int r = comm.size() - 2; r >= 0; --r) backwards[i] += revealing(r, i);
    }
    comm.sum(Point::kFfnOut, rig.device(data.data()), n, nullptr);
    CHECK_MESSAGE(same_bits(data, expected), "size ", n);
    // The values would show another order.
    if (comm.size() > 2 && n >= 1000) CHECK_FALSE(same_bits(data, backwards));
  }
}

COMM_CASE("a sum keeps negative zero, infinity and NaN") {
  Comm& comm = rig.comm;
  std::vector<float> data{-0.0f, comm.rank() == comm.size() - 1 ? INFINITY : 1.0f,
                          comm.rank() == 0 ? NAN : 1.0f};
  comm.sum(Point::kEmbed, rig.device(data.data()), data.size(), nullptr);
  CHECK(std::signbit(data[0]));
  CHECK(std::isinf(data[1]));
  CHECK(std::isnan(data[2]));
}

COMM_CASE("gather_rows puts each rank's columns where its band is, for uneven and empty widths") {
  Comm& comm = rig.comm;
  for (std::size_t scale : {std::size_t{1}, std::size_t{37}}) {
    std::vector<std::size_t> widths(comm.size());
    for (int r = 0; r < comm.size(); ++r)
      widths[r] = (r * 5 + 3) % 7 % 4 * scale;  // 3 1 2 0 2 0 1 3
    const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
    const std::size_t width = widths[comm.rank()];
    const std::size_t begin =
        std::accumulate(widths.begin(), widths.begin() + comm.rank(), std::size_t{0});
    for (std::size_t n_row : {0, 1, 2, 17}) {
      std::vector<float> mine(n_row * width);
      std::vector<float> all(n_row * total, -1.0f);
      std::vector<float> expected(n_row * total);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<float>(i);
      for (std::size_t row = 0; row < n_row; ++row) {
        std::copy_n(expected.data() + row * total + begin, width, mine.data() + row * width);
      }
      comm.gather_rows(Point::kRouterLatent, rig.device(mine.data()), rig.device(all.data()), n_row,
                       widths, nullptr);
      CHECK_MESSAGE(all == expected, n_row, " rows of ", total);
    }
  }
}

COMM_CASE("sum_bands leaves each rank the sum of its own columns, with the bits of plain loops") {
  Comm& comm = rig.comm;
  std::vector<std::size_t> widths;
  for (int r = 0; r < comm.size(); ++r) widths.push_back((r * 5 + 3) % 7 % 4 * 11);
  const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
  const std::size_t begin =
      std::accumulate(widths.begin(), widths.begin() + comm.rank(), std::size_t{0});
  for (std::size_t n_row : {0, 1, 5}) {
    std::vector<float> data(n_row * total);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = revealing(comm.rank(), i);
    comm.sum_bands(Point::kMoeLatent, rig.device(data.data()), n_row, widths, nullptr);
    for (std::size_t row = 0; row < n_row; ++row) {
      for (std::size_t k = 0; k < widths[comm.rank()]; ++k) {
        const std::size_t i = row * total + begin + k;
        float expected = revealing(0, i);
        for (int r = 1; r < comm.size(); ++r) expected += revealing(r, i);
        CHECK(data[i] == expected);
      }
    }
  }
}

COMM_CASE("gather_rows of nothing at all returns") {
  const std::vector<std::size_t> widths(rig.comm.size(), 0);
  rig.comm.gather_rows(Point::kLogits, rig.device(nullptr), rig.device(nullptr), 3, widths,
                       nullptr);
  CHECK(rig.comm.stats(Point::kLogits).bytes == 0);
}

COMM_CASE("gather_rows refuses a list of widths of another length than the group") {
  const std::vector<std::size_t> widths(rig.comm.size() + 1, 0);
  CHECK_THROWS_AS(rig.comm.gather_rows(Point::kLogits, nullptr, nullptr, 1, widths, nullptr),
                  std::logic_error);
}

COMM_CASE("a broadcast gives every root's bytes to all") {
  Comm& comm = rig.comm;
  for (std::size_t n : sizes_up_to(std::min<std::size_t>(rig.max_count, 100003))) {
    for (int root = 0; root < comm.size(); ++root) {
      const std::string expected(n, static_cast<char>('a' + root));
      std::string data = comm.rank() == root ? expected : std::string(n, '?');
      comm.broadcast(root % 2 == 0 ? Point::kRunConfig : Point::kStep, bytes_of(data), root);
      CHECK(data == expected);
    }
  }
}

COMM_CASE("gather_bytes brings texts of any length, also none, to the root alone") {
  Comm& comm = rig.comm;
  const auto text = [&](int r) {
    return std::string(r % 3 == 1 ? 0 : r * 1000 + 1, static_cast<char>('a' + r));
  };
  for (int root = 0; root < comm.size(); ++root) {
    std::string mine = text(comm.rank());
    const auto all = comm.gather_bytes(Point::kResidency, bytes_of(mine), root);
    REQUIRE(all.size() == (comm.rank() == root ? comm.size() : 0));
    for (std::size_t r = 0; r < all.size(); ++r)
      CHECK(text_of(all[r]) == text(static_cast<int>(r)));
  }
}

COMM_CASE("all_gather_bytes gives all ranks' bytes to all, in rank order") {
  Comm& comm = rig.comm;
  for (std::size_t n : {0, 1, 5000}) {
    std::string mine(n, static_cast<char>('a' + comm.rank()));
    const auto all = comm.all_gather_bytes(Point::kModelCheck, bytes_of(mine));
    REQUIRE(all.size() == static_cast<std::size_t>(comm.size()));
    for (int r = 0; r < comm.size(); ++r)
      CHECK(text_of(all[r]) == std::string(n, static_cast<char>('a' + r)));
  }
}

COMM_CASE("agree returns where all are well") {
  for (int i = 0; i < 3; ++i) CHECK_NOTHROW(rig.comm.agree(std::nullopt));
}

COMM_CASE("agree throws the lowest failing rank's line and exit code on every rank") {
  Comm& comm = rig.comm;
  for (int lowest = 0; lowest < comm.size(); ++lowest) {
    std::optional<Fault> mine;
    // The highest rank fails too; its line is long and must not be the one that is shown.
    if (comm.rank() == comm.size() - 1) mine = Fault{4, std::string(5000, 'z')};
    if (comm.rank() == lowest)
      mine = Fault{2 + lowest, "blk." + std::to_string(lowest) + ": cut short"};
    try {
      comm.agree(mine);
      FAIL("agree() returned");
    } catch (const AgreedFault& agreed) {
      CHECK(agreed.from() == lowest);
      CHECK(agreed.fault().exit_code == 2 + lowest);
      CHECK(agreed.what() == "rank " + std::to_string(lowest) + "/" + std::to_string(comm.size()) +
                                 ": blk." + std::to_string(lowest) + ": cut short");
    }
  }
  CHECK_NOTHROW(comm.agree(std::nullopt));  // the group is whole after a fault that all know of
}

COMM_CASE("agree passes on a fault without a line") {
  try {
    rig.comm.agree(Fault{3, ""});
    FAIL("agree() returned");
  } catch (const AgreedFault& agreed) {
    CHECK(agreed.from() == 0);
    CHECK(agreed.fault().exit_code == 3);
    CHECK(agreed.fault().line.empty());
  }
}

COMM_CASE("a barrier holds every rank until the last has come") {
  Comm& comm = rig.comm;
  comm.barrier(Point::kStep);
  for (int late = 0; late < std::min(comm.size(), 3); ++late) {
    const auto begin = std::chrono::steady_clock::now();
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(40));
    comm.barrier(Point::kModelCheck);
    // The ranks leave the barrier before one moments apart, hence not the full time.
    if (comm.size() > 1)
      CHECK(std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(20));
    comm.barrier(Point::kModelCheck);
  }
}

COMM_CASE("messages between two ranks arrive in the order they were sent") {
  Comm& comm = rig.comm;
  if (comm.size() == 1) return;
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  for (std::size_t n : sizes_up_to(std::min<std::size_t>(rig.max_count, 100003))) {
    std::vector<float> token(n, 0.0f);
    for (int lap = 0; lap < 2; ++lap) {
      if (comm.rank() != 0)
        comm.recv(Point::kStageHandOff, rig.device(token.data()), n, previous, nullptr);
      for (float& x : token) x += std::ldexp(1.0f, comm.rank());
      comm.send(Point::kStageHandOff, rig.device(token.data()), n, next, nullptr);
      if (comm.rank() == 0)
        comm.recv(Point::kStageHandOff, rig.device(token.data()), n, previous, nullptr);
    }
    if (comm.rank() == 0)
      CHECK(token == std::vector<float>(n, 2.0f * static_cast<float>((1u << comm.size()) - 1)));
  }
  float first = 1;
  float second = 2;
  if (comm.rank() == 0) {
    comm.send(Point::kStageHandOff, rig.device(&first), 1, 1, nullptr);
    comm.send(Point::kStageHandOff, rig.device(&second), 1, 1, nullptr);
  } else if (comm.rank() == 1) {
    comm.recv(Point::kStageHandOff, rig.device(&second), 1, 0, nullptr);
    comm.recv(Point::kStageHandOff, rig.device(&first), 1, 0, nullptr);
    CHECK(second == 1);
    CHECK(first == 2);
  }
}

COMM_CASE("a peer outside the group is refused") {
  float x = 0;
  CHECK_THROWS_AS(rig.comm.send(Point::kStageHandOff, &x, 1, rig.comm.size(), nullptr),
                  std::logic_error);
  CHECK_THROWS_AS(rig.comm.recv(Point::kStageHandOff, &x, 1, -1, nullptr), std::logic_error);
  CHECK_THROWS_AS(rig.comm.broadcast(Point::kStep, {}, rig.comm.size()), std::logic_error);
}

COMM_CASE("split groups the ranks of a colour, ordered by key") {
  Comm& comm = rig.comm;
  const int colour = comm.rank() % 2;
  const auto group = comm.split(colour, -comm.rank());
  const int size = (comm.size() + 1 - colour) / 2;
  CHECK(group->size() == size);
  CHECK(group->rank() == size - 1 - comm.rank() / 2);
  float x = std::ldexp(1.0f, comm.rank());
  group->sum(Point::kMoeLatent, rig.device(&x), 1, nullptr);
  float expected = 0;
  for (int r = colour; r < comm.size(); r += 2) expected += std::ldexp(1.0f, r);
  CHECK(x == expected);
  CHECK(comm.stats(Point::kMoeLatent).calls == 0);
  // Groups of groups, and equal keys: then the order is that of the ranks.
  const auto whole = comm.split(0, 7);
  CHECK(whole->rank() == comm.rank());
  const auto alone = group->split(group->rank(), 0);
  CHECK(alone->size() == 1);
  // All three groups work after each other was made.
  std::string text = group->rank() == 0 ? std::to_string(colour) : "?";
  group->broadcast(Point::kStep, bytes_of(text), 0);
  CHECK(text == std::to_string(colour));
  whole->barrier(Point::kStep);
}

COMM_CASE("a fault in a group stays in that group") {
  const auto group = rig.comm.split(rig.comm.rank() % 2, 0);
  std::optional<Fault> fault;
  if (rig.comm.rank() % 2 == 0) fault = Fault{2, "even"};
  try {
    group->agree(fault);
    CHECK(rig.comm.rank() % 2 == 1);
  } catch (const AgreedFault& agreed) {
    CHECK(agreed.fault().line == "even");
    CHECK(rig.comm.rank() % 2 == 0);
  }
}

COMM_CASE("calls, bytes and time are counted at their Point") {
  const auto fresh = rig.comm.split(0, 0);
  Comm& comm = *fresh;
  const std::uint64_t world = comm.size();
  CHECK(comm.total_calls() == 0);
  std::vector<float> data(10 * world);
  comm.sum(Point::kAttnOut, rig.device(data.data()), 10, nullptr);
  comm.sum(Point::kAttnOut, rig.device(data.data()), 0, nullptr);
  // A sum over one rank is no call at all.
  CHECK(comm.stats(Point::kAttnOut).calls == (world == 1 ? 0 : 2));
  CHECK(comm.stats(Point::kAttnOut).bytes == (world == 1 ? 0 : 40));
  std::vector<float> all(20 * world);
  comm.gather_rows(Point::kLogits, rig.device(data.data()), rig.device(all.data()), 2,
                   std::vector<std::size_t>(world, 5), nullptr);
  CHECK(comm.stats(Point::kLogits).calls == 1);
  CHECK(comm.stats(Point::kLogits).bytes == 40 * world);
  std::string text(3, 'x');
  comm.broadcast(Point::kRunConfig, bytes_of(text), 0);
  CHECK(comm.stats(Point::kRunConfig).bytes == 3);
  comm.gather_bytes(Point::kCandidates, bytes_of(text), 0);
  CHECK(comm.stats(Point::kCandidates).bytes == (comm.rank() == 0 ? 3 * world : 3));
  comm.all_gather_bytes(Point::kModelCheck, bytes_of(text));
  CHECK(comm.stats(Point::kModelCheck).bytes == 3 * world);
  comm.agree(std::nullopt);
  CHECK(comm.stats(Point::kAgree).calls == 1);
  CHECK(comm.stats(Point::kAgree).bytes == 0);
  if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  comm.barrier(Point::kResidency);
  CHECK(comm.stats(Point::kResidency).calls == 1);
  if (comm.rank() != 0) CHECK(comm.stats(Point::kResidency).seconds > 0.01);
  CHECK(comm.stats(Point::kResidency).seconds < 10);
  CHECK(comm.total_calls() == (world == 1 ? 6 : 8));
  if (world == 1) return;
  if (comm.rank() == 0) comm.send(Point::kStageHandOff, rig.device(data.data()), 7, 1, nullptr);
  if (comm.rank() == 1) comm.recv(Point::kStageHandOff, rig.device(data.data()), 7, 0, nullptr);
  CHECK(comm.stats(Point::kStageHandOff).calls == (comm.rank() < 2 ? 1 : 0));
  CHECK(comm.stats(Point::kStageHandOff).bytes == (comm.rank() < 2 ? 28 : 0));
}

COMM_CASE("different calls after each other do not take each other's messages") {
  Comm& comm = rig.comm;
  for (int i = 0; i < 20; ++i) {
    std::vector<float> data(i * 300 + 1, std::ldexp(1.0f, comm.rank()));
    comm.sum(Point::kAttnOut, rig.device(data.data()), data.size(), nullptr);
    std::string text = comm.rank() == i % comm.size() ? std::to_string(i)
                                                      : std::string(std::to_string(i).size(), '?');
    comm.broadcast(Point::kAttnOut, bytes_of(text), i % comm.size());
    CHECK(text == std::to_string(i));
    CHECK(data == std::vector<float>(data.size(), static_cast<float>((1u << comm.size()) - 1)));
  }
}

}  // namespace k3::test
