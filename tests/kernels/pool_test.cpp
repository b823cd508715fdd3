#include <doctest/doctest.h>

#include <sched.h>

#include <atomic>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/cpu/places.h"
#include "kernels/cpu/pool.h"

namespace k3::cpu {
namespace {

std::vector<int> allowed_now() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus;
  for (int c = 0; c < CPU_SETSIZE; ++c) {
    if (CPU_ISSET(c, &set)) cpus.push_back(c);
  }
  return cpus;
}

}  // namespace

TEST_CASE("every thread of a pool runs each call once, and its writes are seen after it") {
  for (const int threads : {1, 2, 5}) {
    for (const bool crowded : {false, true}) {
      Pool pool({threads, {}, crowded});
      REQUIRE(pool.size() == threads);
      std::vector<int> calls(static_cast<std::size_t>(threads), 0);
      for (int round = 0; round < 300; ++round) {
        pool.run([&](int t) { ++calls[static_cast<std::size_t>(t)]; });
      }
      CHECK(calls == std::vector<int>(static_cast<std::size_t>(threads), 300));
    }
  }
}

TEST_CASE("split and deal cover every piece once, also fewer pieces than threads, also none") {
  Pool pool({4, {}, false});
  for (const std::int64_t n : {0, 1, 2, 3, 4, 5, 97}) {
    for (const std::int64_t cost : {std::int64_t{1}, std::int64_t{1} << 20}) {
      std::vector<int> split(static_cast<std::size_t>(n), 0), dealt = split;
      pool.split(n, cost, [&](std::int64_t b, std::int64_t e, int) {
        for (; b < e; ++b) ++split[static_cast<std::size_t>(b)];
      });
      pool.deal(n, cost, [&](std::int64_t b, std::int64_t e, int) {
        for (; b < e; ++b) ++dealt[static_cast<std::size_t>(b)];
      });
      const std::vector<int> once(static_cast<std::size_t>(n), 1);
      CHECK(split == once);
      CHECK(dealt == once);
    }
  }
}

TEST_CASE("work too small to wake anybody stays on the calling thread") {
  Pool pool({3, {}, false});
  const auto me = std::this_thread::get_id();
  pool.split(2, 10, [&](std::int64_t, std::int64_t, int t) {
    CHECK(t == 0);
    CHECK(std::this_thread::get_id() == me);
  });
}

TEST_CASE("an exception on any thread reaches the caller, and the pool goes on") {
  Pool pool({3, {}, false});
  for (int thrower = 0; thrower < 3; ++thrower) {
    CHECK_THROWS_WITH_AS(pool.run([&](int t) {
      if (t == thrower) throw std::runtime_error("thread " + std::to_string(t));
    }),
                         doctest::Contains(std::to_string(thrower).c_str()), std::runtime_error);
    std::atomic<int> n{0};
    pool.run([&](int) { ++n; });
    CHECK(n == 3);
  }
}

TEST_CASE("scratch memory is each thread's own and keeps its place until more is asked for") {
  Pool pool({2, {}, false});
  pool.reserve(100);
  float *a = pool.scratch(0), *b = pool.scratch(1);
  CHECK(a != b);
  CHECK(reinterpret_cast<std::uintptr_t>(a) % 64 == 0);
  pool.reserve(50);
  CHECK(pool.scratch(0) == a);
  pool.reserve(1 << 16);
  pool.run([&](int t) { std::fill_n(pool.scratch(t), 1 << 16, 1.0f); });
}

TEST_CASE("threads run on the CPUs they were given, the caller once it says so") {
  const std::vector<int> before = allowed_now();
  if (before.size() < 2) return;  // nothing to choose from
  std::thread([&] {
    Pool pool({2, {before[1], before[0]}, false});
    pool.run([&](int t) { CHECK((allowed_now() == before) == (t == 0)); });
    pool.bind_caller();
    pool.run([&](int t) { CHECK(allowed_now() == std::vector<int>{before[t == 0 ? 1 : 0]}); });
  }).join();
  CHECK_THROWS_AS(Pool({2, {before[0], CPU_SETSIZE - 1}, false}), std::system_error);
}

TEST_CASE("this machine's cores are listed, each CPU once") {
  std::set<int> seen;
  for (const std::vector<int>& core : machine_cores()) {
    CHECK(!core.empty());
    for (const int cpu : core) CHECK(seen.insert(cpu).second);
  }
  for (const int cpu : allowed_now()) CHECK(seen.count(cpu) == 1);
}

namespace {

// Two sockets of four cores with two hardware threads each, numbered as Linux does: cores first.
std::vector<std::vector<int>> two_sockets() {
  std::vector<std::vector<int>> cores;
  for (int c = 0; c < 8; ++c) cores.push_back({c, c + 8});
  return cores;
}

std::vector<int> range(int begin, int end) {
  std::vector<int> v(static_cast<std::size_t>(end - begin));
  std::iota(v.begin(), v.end(), begin);
  return v;
}

}  // namespace

TEST_CASE("ranks that are free to roam get neighbouring cores of their own") {
  const std::vector<Claim> four(4, Claim{range(0, 16), 2});
  CHECK(place(two_sockets(), four, 0).cpus == std::vector<int>{0, 1});
  CHECK(place(two_sockets(), four, 3).cpus == std::vector<int>{6, 7});
  const std::vector<Claim> uneven{{range(0, 16), 3}, {range(0, 16), 5}};
  CHECK(place(two_sockets(), uneven, 1).cpus == std::vector<int>{3, 4, 5, 6, 7});
}

TEST_CASE("a second hardware thread is used when every core has a first one") {
  const std::vector<Claim> two(2, Claim{range(0, 16), 8});
  CHECK(place(two_sockets(), two, 0).cpus == range(0, 8));
  CHECK(place(two_sockets(), two, 1).cpus == range(8, 16));
}

TEST_CASE("a rank bound by the launcher stays in its set, on cores first") {
  const std::vector<Claim> bound{{{0, 1, 8, 9}, 2}, {{4, 5, 12, 13}, 3}};
  CHECK(place(two_sockets(), bound, 0).cpus == std::vector<int>{0, 1});
  CHECK(place(two_sockets(), bound, 1).cpus == std::vector<int>{4, 5, 12});
  const std::vector<Claim> shared{{{2, 3}, 1}, {{2, 3}, 1}, {{6}, 1}};
  CHECK(place(two_sockets(), shared, 0).cpus == std::vector<int>{2});
  CHECK(place(two_sockets(), shared, 1).cpus == std::vector<int>{3});
  CHECK(place(two_sockets(), shared, 2).cpus == std::vector<int>{6});
}

TEST_CASE(
    "threads stay unbound where CPUs are left over, where sets overlap and where too few are") {
  const Places rest = place(two_sockets(), {{range(0, 16), 2}}, 0);
  CHECK(rest.cpus.empty());
  CHECK(!rest.crowded);
  const Places overlap = place(two_sockets(), {{{0, 1}, 2}, {{1, 2}, 2}}, 0);
  CHECK(overlap.cpus.empty());
  CHECK(overlap.why == "ranks are bound to overlapping sets");
  const Places many = place(two_sockets(), {{{0, 1}, 2}, {{0, 1}, 1}}, 1);
  CHECK(many.cpus.empty());
  CHECK(many.crowded);
}

TEST_CASE("the CPUs near a device are those of its NUMA domain, whatever length its number has") {
  const std::string two = K3_TEST_DATA "/two-gpus.xml";
  CHECK(cpus_near("0000:17:00.0", two) == std::vector<int>{0, 1});
  CHECK(cpus_near("00000000:AA:00.0", two) == std::vector<int>{2, 3});
  // Near no part of the machine more than another; not there at all.
  CHECK(cpus_near("0000:c1:00.0", two).empty());
  CHECK(cpus_near("0000:01:00.0", two).empty());
  CHECK_THROWS_AS(cpus_near("0000:01:00.0", "/no/such/file.xml"), std::system_error);
}

}  // namespace k3::cpu
