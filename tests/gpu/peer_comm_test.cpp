// Peer memory between processes, held to plain loops, to exact sums and to NCCL. Two GPUs at least; more ranks than GPUs take
// turns on one, which is slow, so they do less.
#include "comm/peer_comm.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "comm/mpi_comm.h"
#include "comm/nccl_comm.h"
#include "tests/gpu/device_memory.h"

namespace k3::test {
namespace {

struct Rig {
  World world;          // the main has started MPI
  bool shared = false;  // a GPU holds several ranks
  Rig() {
    int n_device = 0;
    cuda(cudaGetDeviceCount(&n_device));
    const LocalGroup local = local_group(world);
    cuda(cudaSetDevice(local.rank % n_device));
    shared = local.size > n_device;
  }
  int repeats(int many) const { return shared ? std::max(1, many / 100) : many; }
};

Rig& rig() {
  static Rig rig;
  return rig;
}

std::unique_ptr<Comm> peer() { return make_peer_comm(make_mpi_comm(rig().world)); }

// The same on every rank.
std::mt19937& dice() {
  static std::mt19937 dice(7);
  return dice;
}

// From single floats to what takes several pieces in every path; each order of magnitude as often as another.
std::size_t random_count(std::size_t most) {
  const double exponent =
      std::uniform_real_distribution<>(0, std::log2(static_cast<double>(most)))(dice());
  return static_cast<std::size_t>(std::exp2(exponent));
}

// Small integers: their sums are exact in any order.
float whole(int rank, std::size_t i, std::uint32_t salt) {
  const std::uint32_t h = (static_cast<std::uint32_t>(i) * 2654435761u + salt * 40503u) ^
                          (static_cast<std::uint32_t>(rank) * 97u);
  return static_cast<float>(static_cast<int>(h % 2001) - 1000);
}
// Values whose sum shows the order of its terms.
float revealing(int rank, std::size_t i) {
  std::uint32_t h =
      static_cast<std::uint32_t>(i) * 2654435761u + static_cast<std::uint32_t>(rank) * 40503u + 1;
  h = (h ^ (h >> 15)) * 2246822519u;
  h ^= h >> 13;
  return std::ldexp(static_cast<float>(h >> 8) / 16777216.0f - 0.5f, static_cast<int>(h % 40) - 10);
}

template <class F>
std::vector<float> values(std::size_t n, const F& f) {
  std::vector<float> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = f(i);
  return v;
}
std::vector<float> whole_values(int rank, std::size_t n, std::uint32_t salt) {
  return values(n, [&](std::size_t i) { return whole(rank, i, salt); });
}
std::vector<float> whole_sums(int size, std::size_t n, std::uint32_t salt) {
  return values(n, [&](std::size_t i) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += whole(r, i, salt);
    return sum;
  });
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_CASE("sums of whole numbers are exact on every rank, over thousands of calls of random size") {
  const auto comm = peer();
  Stream stream;
  Floats data(std::size_t{4} << 20);
  std::size_t wrong = 0;
  const int n = rig().repeats(4000);
  for (int k = 0; k < n; ++k) {
    const std::size_t most = k % 100 == 0 ? data.size() : k % 10 == 0 ? 200000 : 12000;
    const std::size_t count = random_count(most);
    data.set(whole_values(comm->rank(), count, static_cast<std::uint32_t>(k)));
    comm->sum(Point::kAttnOut, data.data(), count, stream);
    if (data.get(count, stream) != whole_sums(comm->size(), count, static_cast<std::uint32_t>(k)))
      ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("a sum adds in rank order and gives the bits of plain loops, at every size") {
  const auto comm = peer();
  Stream stream;
  Floats data(3000001);
  for (std::size_t n :
       {1, 2, 3, 7, 64, 1009, 3584, 7168, 10752, 131072, 131073, 262145, 1000000, 3000001}) {
    data.set(values(n, [&](std::size_t i) { return revealing(comm->rank(), i); }));
    comm->sum(Point::kFfnOut, data.data(), n, stream);
    const auto expected = values(n, [&](std::size_t i) {
      float sum = revealing(0, i);
      for (int r = 1; r < comm->size(); ++r) sum += revealing(r, i);
      return sum;
    });
    CHECK_MESSAGE(same_bits(data.get(n, stream), expected), "size ", n);
  }
}

TEST_CASE("a sum may begin at any float") {
  const auto comm = peer();
  Stream stream;
  Floats data(500010);
  for (std::size_t n : {5, 1001, 500001}) {
    for (std::size_t off : {1, 2, 3}) {
      std::vector<float> all(off, -7.0f);
      const auto mine = whole_values(comm->rank(), n, 3);
      all.insert(all.end(), mine.begin(), mine.end());
      all.push_back(-7.0f);
      data.set(all);
      comm->sum(Point::kFfnOut, data.data() + off, n, stream);
      const std::vector<float> got = data.get(all.size(), stream);
      CHECK(std::vector<float>(got.begin() + static_cast<std::ptrdiff_t>(off), got.end() - 1) ==
            whole_sums(comm->size(), n, 3));
      CHECK(got[off - 1] == -7.0f);
      CHECK(got.back() == -7.0f);
    }
  }
}

TEST_CASE("a sum keeps negative zero, infinity and NaN") {
  const auto comm = peer();
  Stream stream;
  Floats data(3);
  data.set(
      {-0.0f, comm->rank() == comm->size() - 1 ? INFINITY : 1.0f, comm->rank() == 0 ? NAN : 1.0f});
  comm->sum(Point::kEmbed, data.data(), 3, stream);
  const auto got = data.get(3, stream);
  CHECK(std::signbit(got[0]));
  CHECK(std::isinf(got[1]));
  CHECK(std::isnan(got[2]));
}

TEST_CASE("calls that follow each other without a wait do not mix") {
  const auto comm = peer();
  Stream stream;
  const std::size_t sizes[] = {1, 3584, 14, 10752, 300000, 2, 7168};
  std::vector<std::unique_ptr<Floats>> data;
  for (int round = 0; round < rig().repeats(300); ++round) {
    data.clear();
    for (std::size_t n : sizes) {
      data.push_back(std::make_unique<Floats>(n));
      data.back()->set(whole_values(comm->rank(), n, static_cast<std::uint32_t>(n)));
    }
    // One rank lags behind another by turns, by far more than two calls.
    if (round % comm->size() == comm->rank() && round < 20)
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    for (std::size_t k = 0; k < data.size(); ++k)
      comm->sum(Point::kAttnOut, data[k]->data(), data[k]->size(), stream);
    for (std::size_t k = 0; k < data.size(); ++k) {
      if (data[k]->get(data[k]->size(), stream) !=
          whole_sums(comm->size(), data[k]->size(), static_cast<std::uint32_t>(data[k]->size()))) {
        FAIL("round ", round, " size ", data[k]->size());
      }
    }
  }
}

// Rows of every rank's own width; position tells all.
std::vector<float> gathered(std::size_t n_row, std::size_t total, float salt) {
  return values(n_row * total, [&](std::size_t i) { return static_cast<float>(i % 65521) + salt; });
}
std::vector<float> my_columns(const std::vector<float>& all, std::size_t n_row,
                              const std::vector<std::size_t>& widths, int rank) {
  const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
  const std::size_t begin = std::accumulate(widths.begin(), widths.begin() + rank, std::size_t{0});
  std::vector<float> mine;
  for (std::size_t row = 0; row < n_row; ++row) {
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(row * total + begin);
    mine.insert(mine.end(), at,
                at + static_cast<std::ptrdiff_t>(widths[static_cast<std::size_t>(rank)]));
  }
  return mine;
}

TEST_CASE(
    "gather_rows puts uneven and empty bands in place, over hundreds of calls of random shape") {
  const auto comm = peer();
  Stream stream;
  Floats mine(std::size_t{2} << 20), all(std::size_t{8} << 20);
  std::size_t wrong = 0;
  for (int k = 0; k < rig().repeats(1000); ++k) {
    std::vector<std::size_t> widths;
    const std::size_t most = k % 10 == 0 ? 5000 : 600;
    for (int r = 0; r < comm->size(); ++r) {
      const bool empty = std::uniform_int_distribution<>(0, 3)(dice()) == 0;
      widths.push_back(empty ? 0 : random_count(most));
    }
    const std::size_t n_row = k % 4 == 0 ? random_count(300) : 1;
    const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
    const std::vector<float> expected = gathered(n_row, total, static_cast<float>(k));
    mine.set(my_columns(expected, n_row, widths, comm->rank()));
    cuda(cudaMemset(all.data(), 0xff, n_row * total * sizeof(float)));
    cuda(cudaDeviceSynchronize());
    comm->gather_rows(Point::kRouterLatent, mine.data(), all.data(), n_row, widths, stream);
    if (all.get(n_row * total, stream) != expected) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE(
    "sum_bands leaves each rank the ordered sum of its own columns, over calls of random shape") {
  const auto comm = peer();
  Stream stream;
  Floats data(std::size_t{2} << 20);
  std::size_t wrong = 0;
  for (int k = 0; k < rig().repeats(1000); ++k) {
    std::vector<std::size_t> widths;
    const std::size_t most = k % 50 == 0 ? 100000 : 2000;
    for (int r = 0; r < comm->size(); ++r) {
      const bool empty = std::uniform_int_distribution<>(0, 4)(dice()) == 0;
      widths.push_back(empty ? 0 : random_count(most));
    }
    const std::size_t n_row = k % 4 == 0 && most < 10000 ? random_count(30) : 1;
    const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
    const auto value = [&](int r) {
      return values(n_row * total,
                    [&](std::size_t i) { return revealing(r, i + static_cast<std::size_t>(k)); });
    };
    std::vector<float> expected = value(0);
    for (int r = 1; r < comm->size(); ++r) {
      const std::vector<float> theirs = value(r);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += theirs[i];
    }
    data.set(value(comm->rank()));
    comm->sum_bands(Point::kMoeLatent, data.data(), n_row, widths, stream);
    const std::vector<float> got = data.get(n_row * total, stream);
    if (!same_bits(my_columns(got, n_row, widths, comm->rank()),
                   my_columns(expected, n_row, widths, comm->rank()))) {
      ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a graph with sums and gathers is replayed a thousand times, with new values each time") {
  const auto comm = peer();
  Stream stream;
  const std::size_t big = 200000, small = 7168;
  const std::vector<std::size_t> widths(static_cast<std::size_t>(comm->size()), 560);
  const std::size_t total = 560 * widths.size();
  Floats source(big), large(big), little(small), gathered_rows(total);
  const Graph graph(stream, [&] {
    const auto fill = [&](Floats& to) {
      cuda(cudaMemcpyAsync(to.data(), source.data(), to.size() * sizeof(float),
                           cudaMemcpyDeviceToDevice, stream));
    };
    fill(little);
    comm->sum(Point::kAttnOut, little.data(), small, stream);
    comm->gather_rows(Point::kRouterLatent, source.data(), gathered_rows.data(), 1, widths, stream);
    fill(large);
    comm->sum(Point::kFfnOut, large.data(), big, stream);
    comm->sum(Point::kMoeLatent, little.data(), 3584, stream);
  });
  std::size_t wrong = 0;
  for (int k = 0; k < rig().repeats(1000); ++k) {
    const auto salt = static_cast<std::uint32_t>(k);
    source.set(whole_values(comm->rank(), big, salt));
    graph.run(stream);
    if (k % 3 != 0) {  // also replays that follow each other at once
      graph.run(stream);
      graph.run(stream);
    }
    auto sums = whole_sums(comm->size(), big, salt);
    bool ok = large.get(big, stream) == sums;
    sums.resize(small);
    for (std::size_t i = 0; i < 3584; ++i) sums[i] *= static_cast<float>(comm->size());
    ok = ok && little.get(small, stream) == sums;
    const auto rows = gathered_rows.get(total, stream);
    for (int r = 0; r < comm->size(); ++r) {
      for (std::size_t i = 0; i < 560; ++i)
        ok = ok && rows[static_cast<std::size_t>(r) * 560 + i] == whole(r, i, salt);
    }
    // Calls between the replays take part in the same count of epochs.
    comm->sum(Point::kAttnOut, little.data(), 100, stream);
    if (!ok) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("NCCL and peer memory give the same whole numbers") {
  if (rig().shared) return;
  const auto comm = peer();
  const auto nccl = make_nccl_comm(make_mpi_comm(rig().world));
  Stream stream;
  Floats a(1000000), b(1000000);
  for (int k = 0; k < 300; ++k) {
    const std::size_t n = random_count(a.size());
    const auto mine = whole_values(comm->rank(), n, static_cast<std::uint32_t>(k));
    a.set(mine);
    b.set(mine);
    comm->sum(Point::kAttnOut, a.data(), n, stream);
    nccl->sum(Point::kAttnOut, b.data(), n, stream);
    if (a.get(n, stream) != b.get(n, stream)) FAIL("size ", n);
  }
}

TEST_CASE("messages between two ranks arrive in the order they were sent, at every size") {
  const auto comm = peer();
  Stream stream;
  Floats token(5000000);
  const int next = (comm->rank() + 1) % comm->size(),
            previous = (comm->rank() + comm->size() - 1) % comm->size();
  for (std::size_t n : {1, 5, 7168, 64512, 1000003, 5000000}) {
    for (int lap = 0; lap < (rig().shared ? 1 : 5); ++lap) {
      std::vector<float> expected = whole_values(0, n, static_cast<std::uint32_t>(lap));
      if (comm->rank() == 0) token.set(expected);
      if (comm->rank() != 0) comm->recv(Point::kStageHandOff, token.data(), n, previous, stream);
      comm->send(Point::kStageHandOff, token.data(), n, next, stream);
      if (comm->rank() == 0) {
        stream.wait();
        token.set(std::vector<float>(n, -1.0f));
        comm->recv(Point::kStageHandOff, token.data(), n, previous, stream);
      }
      if (token.get(n, stream) != expected) FAIL("size ", n, " lap ", lap);
    }
  }
  // Several under way at once.
  if (comm->rank() < 2) {
    for (int k = 0; k < 50; ++k) {
      const std::vector<float> expected = whole_values(0, 3000, static_cast<std::uint32_t>(k));
      if (comm->rank() == 0) {
        token.set(expected);
        comm->send(Point::kStageHandOff, token.data(), 3000, 1, stream);
        stream.wait();
      } else {
        comm->recv(Point::kStageHandOff, token.data(), 3000, 0, stream);
        if (token.get(3000, stream) != expected) FAIL("message ", k);
      }
    }
  }
}

TEST_CASE("split groups have memory of their own") {
  const auto comm = peer();
  CHECK(comm->capturable());
  Stream stream;
  const auto group = comm->split(comm->rank() % 2, -comm->rank());
  Floats x(1000);
  x.set(std::vector<float>(1000, std::ldexp(1.0f, comm->rank())));
  group->sum(Point::kMoeLatent, x.data(), 1000, stream);
  float expected = 0;
  for (int r = comm->rank() % 2; r < comm->size(); r += 2) expected += std::ldexp(1.0f, r);
  CHECK(x.get(1000, stream) == std::vector<float>(1000, expected));
  const std::vector<std::size_t> widths(static_cast<std::size_t>(group->size()), 10);
  Floats all(1000);
  group->gather_rows(Point::kLogits, x.data(), all.data(), 2, widths, stream);
  CHECK(all.get(20, stream)[0] == expected);
  comm->sum(Point::kMoeLatent, x.data(), 1000, stream);
  stream.wait();
}

TEST_CASE(
    "a peer that does not come ends the wait, and the line says which call, where and for whom") {
  const auto comm = peer();
  const auto group = comm->split(0, 0);
  comm->set_time_limit(1);
  Stream stream;
  Floats x(7168);
  x.set(std::vector<float>(7168, 1.0f));
  group->set_place({"layer", 5});
  group->sum(Point::kAttnOut, x.data(), 7168, stream);
  stream.wait();
  const int late = comm->size() - 1;
  if (comm->rank() == late) {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    return;
  }
  group->sum(Point::kAttnOut, x.data(), 7168, stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const auto open = rig().world.board()->open_call();
  CHECK(open);
  if (open) CHECK(open->name == "sum(AttnOut) call 2, layer 5 for rank " + std::to_string(late));
  stream.wait();  // it ends
  std::string line;
  try {
    comm->barrier(Point::kStep);  // the failure of a group is that of all
  } catch (const CommError& error) {
    line = error.what();
  }
  CAPTURE(line);
  CHECK(line.find("): waited 1") != std::string::npos);
  CHECK(line.ends_with(" s in sum(AttnOut) call 2, layer 5 for rank " + std::to_string(late)));
}

}  // namespace
}  // namespace k3::test
