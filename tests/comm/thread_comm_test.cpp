#include "comm/thread_comm.h"

#include "tests/comm/comm_cases.h"

namespace k3::test {

void on_ranks(const std::function<void(Rig&)>& body) {
  for (int world : {1, 2, 3, 8}) {
    CAPTURE(world);
    run_ranks(world, [&](Comm& comm) {
      Rig rig{comm, 100003};
      body(rig);
    });
  }
}

namespace {

// What run_ranks throws, as text.
template <class Error>
std::string error_of(int world, const std::function<void(Comm&)>& body) {
  try {
    run_ranks(world, body);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void add_one(Comm& comm, Point point = Point::kAttnOut) {
  float x = 1;
  comm.sum(point, &x, 1, nullptr);
}

TEST_CASE(
    "a rank that throws releases the ranks that wait for it, and its own error is the one "
    "reported") {
  for (int culprit : {0, 1, 2}) {
    std::atomic<int> released{0};
    const std::string error = error_of<std::invalid_argument>(3, [&](Comm& comm) {
      add_one(comm);
      if (comm.rank() == culprit) throw std::invalid_argument("bad weights");
      try {
        add_one(comm);
      } catch (const CommError& e) {
        ++released;
        const std::string line = "rank " + std::to_string(comm.rank()) +
                                 "/3: sum(AttnOut) call 2: given up because rank " +
                                 std::to_string(culprit) + " failed";
        CHECK(e.what() == line);
        throw;
      }
    });
    CHECK(error == "bad weights");
    CHECK(released == 2);
  }
}

TEST_CASE("a failing rank releases ranks that wait in another group and in send and recv") {
  const std::string error = error_of<std::invalid_argument>(6, [&](Comm& comm) {
    const auto group = comm.split(comm.rank() / 2, 0);
    float x = 0;
    switch (comm.rank()) {
      case 0:
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        throw std::invalid_argument("rank 0 gives up");
      case 2:
        return add_one(*group);  // rank 3 is elsewhere
      case 4:
        return group->recv(Point::kStageHandOff, &x, 1, 1, nullptr);
      case 5:
        return comm.send(Point::kStageHandOff, &x, 1, 0, nullptr);
      default:
        return comm.barrier(Point::kStep);
    }
  });
  CHECK(error == "rank 0 gives up");
}

TEST_CASE("ranks that wait for a rank that has returned throw") {
  const std::string error = error_of<CommError>(3, [&](Comm& comm) {
    if (comm.rank() != 2) add_one(comm);
  });
  CHECK(error.find("sum(AttnOut) call 1: waits for a rank that has returned") != std::string::npos);
}

TEST_CASE("a rank that returns after its last call does not disturb those still leaving it") {
  for (int i = 0; i < 200; ++i) CHECK_NOTHROW(run_ranks(4, [](Comm& comm) { add_one(comm); }));
}

TEST_CASE("ranks in different calls, or at different Points, are an error that names both") {
  const std::string op = error_of<CommError>(
      2, [&](Comm& comm) { comm.rank() == 0 ? add_one(comm) : comm.barrier(Point::kStep); });
  CHECK(op.find("sum(AttnOut)") != std::string::npos);
  CHECK(op.find("barrier(Step)") != std::string::npos);
  const std::string point = error_of<CommError>(
      3, [&](Comm& comm) { add_one(comm, comm.rank() == 1 ? Point::kFfnOut : Point::kAttnOut); });
  CHECK(point.find("sum(FfnOut)") != std::string::npos);
}

TEST_CASE("a sum over different counts is an error on every rank") {
  std::atomic<int> thrown{0};
  run_ranks(3, [&](Comm& comm) {
    std::vector<float> data(10 + comm.rank() / 2);
    try {
      comm.sum(Point::kEmbed, data.data(), data.size(), nullptr);
    } catch (const CommError& error) {
      ++thrown;
      CHECK(std::string(error.what()).find("expected 4") != std::string::npos);
    }
  });
  CHECK(thrown == 3);
}

TEST_CASE("gather_rows whose ranks see different widths, and a recv of another size, are errors") {
  const std::string rows = error_of<CommError>(2, [&](Comm& comm) {
    std::vector<float> mine(8);
    std::vector<float> all(8);
    const std::size_t second = comm.rank() == 0 ? 2 : 3;
    comm.gather_rows(Point::kLogits, mine.data(), all.data(), 1,
                     std::vector<std::size_t>{1, second}, nullptr);
  });
  CHECK(rows.find("rank 1 has 12 bytes, expected 8") != std::string::npos);
  const std::string recv = error_of<CommError>(2, [&](Comm& comm) {
    std::vector<float> data(8);
    comm.rank() == 0 ? comm.send(Point::kStageHandOff, data.data(), 8, 1, nullptr)
                     : comm.recv(Point::kStageHandOff, data.data(), 7, 0, nullptr);
  });
  CHECK(recv.find("7 values expected, but rank 0 sends 8 values at StageHandOff") !=
        std::string::npos);
}

TEST_CASE(
    "a rank that waits longer than its time limit throws; a wait for the next step has no limit") {
  const std::string error = error_of<CommError>(2, [&](Comm& comm) {
    comm.set_time_limit(0.02);
    if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    comm.broadcast(Point::kStep, {}, 0);
    const auto group = comm.split(0, 0);  // shares the limit
    if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    add_one(*group);
  });
  CHECK(error.find("rank 1/2: sum(AttnOut) call 1: waited 0.0") != std::string::npos);
}

TEST_CASE("a world needs a rank") { CHECK_THROWS_AS(make_thread_comms(0), std::logic_error); }

TEST_CASE("comms can be handed to threads of one's own") {
  const auto comms = make_thread_comms(2);
  std::vector<std::thread> threads;
  for (const auto& comm : comms) threads.emplace_back([&] { add_one(*comm); });
  for (std::thread& thread : threads) thread.join();
  CHECK(comms[0]->total_calls() == 1);
  CHECK(comms[1]->total_calls() == 1);
}

TEST_CASE("every Point has a name of its own") {
  std::vector<std::string> names;
  for (int i = 0; i < static_cast<int>(Point::kCount); ++i)
    names.emplace_back(point_name(static_cast<Point>(i)));
  std::sort(names.begin(), names.end());
  CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
  CHECK(std::find(names.begin(), names.end(), "?") == names.end());
}

}  // namespace
}  // namespace k3::test
