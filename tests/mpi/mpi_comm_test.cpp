#include "comm/mpi_comm.h"

#include <ctime>

#include "tests/comm/comm_cases.h"
#include "tests/support/count_allocations.h"

namespace k3::test {
namespace {

World& world() {
  static World world;  // the main has started MPI, so this one neither starts nor ends it
  return world;
}

// A device whose addresses are not those of the memory behind them: whoever reads one without the
// stage crashes.
class FakeDevice : public HostStage {
 public:
  static constexpr std::uintptr_t kAway = std::uintptr_t{1} << 62;
  static float* address(const float* p) {
    return reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(p) + kAway);
  }

  std::byte* allocate(std::size_t bytes) override {
    ++n_block;
    return new std::byte[bytes];
  }
  void release(std::byte* memory) noexcept override {
    --n_block;
    delete[] memory;
  }
  void to_host(void* host, const void* device, std::size_t bytes, StreamHandle) override {
    if (bytes > 0) std::memcpy(host, behind(device), bytes);
  }
  void to_device(void* device, const void* host, std::size_t bytes, StreamHandle) override {
    if (bytes > 0) std::memcpy(behind(device), host, bytes);
  }

  int n_block = 0;

 private:
  static void* behind(const void* device) {
    return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(device) - kAway);
  }
};

}  // namespace

void on_ranks(const std::function<void(Rig&)>& body) {
  {
    const auto comm = make_mpi_comm(world());
    Rig rig{*comm, 1000000};
    body(rig);
  }
  {
    // Every way of cutting a call into pieces, at sizes where all of them happen.
    MpiOptions options;
    options.max_message_bytes = 1000;
    options.small_sum_bytes = 100;
    options.scratch_floats = 3000;
    const auto comm = make_mpi_comm(world(), nullptr, options);
    Rig rig{*comm, 7168};
    body(rig);
  }
  FakeDevice device;
  {
    const auto comm = make_mpi_comm(world(), &device);
    Rig rig{*comm, 7168, FakeDevice::address};
    body(rig);
  }
  CHECK(device.n_block == 0);
}

namespace {

TEST_CASE("data calls do not allocate once their sizes have been seen") {
  const auto comm = make_mpi_comm(world());
  std::vector<float> data(100000);
  std::vector<float> all(5 * 64 * comm->size());
  const std::vector<std::size_t> widths(comm->size(), 64);
  std::string step(100, 's');
  std::uint64_t before = 0;
  for (int round = 0; round < 3; ++round) {
    before = allocations_so_far();
    comm->sum(Point::kAttnOut, data.data(), 7, nullptr);
    comm->sum(Point::kAttnOut, data.data(), data.size(), nullptr);
    comm->gather_rows(Point::kRouterLatent, data.data(), all.data(), 5, widths, nullptr);
    comm->broadcast(Point::kStep, bytes_of(step), 0);
    comm->barrier(Point::kStep);
  }
  CHECK(allocations_so_far() == before);
}

TEST_CASE("a rank that waits for the next step leaves its core to others") {
  const auto comm = make_mpi_comm(world());
  if (comm->size() == 1) return;
  comm->barrier(Point::kStep);
  const std::clock_t begin = std::clock();
  if (comm->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
  comm->broadcast(Point::kStep, {}, 0);
  const double cpu_s = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  // Other than rank 0 a rank waits half a second here, and one that polled all the time would use
  // its share of the cores.
  CHECK(cpu_s < 0.05);
}

TEST_CASE(
    "a wait beyond the time limit names the call, its number and the ranks that did not come") {
  const auto comm = make_mpi_comm(world());
  if (comm->size() == 1) return;
  const int late = comm->size() - 1;
  const auto group = comm->split(0, 0);
  comm->set_time_limit(0.2);
  std::vector<float> data(3, 1.0f);
  group->sum(Point::kAttnOut, data.data(), 3, nullptr);
  if (comm->rank() != late) {
    try {
      group->sum(Point::kAttnOut, data.data(), 3, nullptr);
      FAIL("sum() returned");
    } catch (const CommError& error) {
      const std::string line = error.what();
      INFO(line);
      const std::string me =
          "rank " + std::to_string(comm->rank()) + "/" + std::to_string(comm->size()) + " (";
      CHECK(line.starts_with(me + world().facts().host + "): waited 0."));
      CHECK(line.ends_with(" s in sum(AttnOut) call 2 for rank " + std::to_string(late)));
    }
    CHECK_THROWS_AS(group->barrier(Point::kStep), CommError);  // unusable from then on
  }
  comm->set_time_limit(0);
  comm->barrier(Point::kStep);  // the group it was split from is not
}

TEST_CASE("a wait for the next step has no time limit") {
  const auto comm = make_mpi_comm(world());
  comm->set_time_limit(0.05);
  if (comm->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(150));
  CHECK_NOTHROW(comm->broadcast(Point::kStep, {}, 0));
  comm->set_time_limit(0);
  comm->barrier(Point::kStep);
}

TEST_CASE(
    "a message of another size than expected is an error that names the sender and both sizes") {
  const auto comm = make_mpi_comm(world());
  if (comm->size() == 1) return;
  std::vector<float> data(10);
  if (comm->rank() == 0) {
    comm->send(Point::kStageHandOff, data.data(), 5, 1, nullptr);
  } else if (comm->rank() == 1) {
    try {
      comm->recv(Point::kStageHandOff, data.data(), 6, 0, nullptr);
      FAIL("recv() returned");
    } catch (const CommError& error) {
      const std::string line = error.what();
      CHECK(line.find("recv(StageHandOff) call 1: rank 0 sent 20 bytes, expected 24") !=
            std::string::npos);
    }
  }
  const auto other = make_mpi_comm(world());
  if (comm->rank() == 0) {
    other->send(Point::kStageHandOff, data.data(), 7, 1, nullptr);
  } else if (comm->rank() == 1) {
    try {
      other->recv(Point::kStageHandOff, data.data(), 6, 0, nullptr);
      FAIL("recv() returned");
    } catch (const CommError& error) {
      const std::string line = error.what();
      CHECK(line.find("recv(StageHandOff) call 1: from rank 0: ") != std::string::npos);
    }
  }
}

TEST_CASE("ranks of one host know their place among each other") {
  const LocalGroup local = local_group(world());
  // The tests run on one host.
  CHECK(local.size == world().size());
  CHECK(local.rank == world().rank());
  CHECK(world().facts().scheduler_world.value_or(1) == world().size());
}

TEST_CASE("sizes that MPI cannot count are refused") {
  MpiOptions options;
  options.max_message_bytes = std::size_t{1} << 31;
  CHECK_THROWS_AS(make_mpi_comm(world(), nullptr, options), std::logic_error);
}

TEST_CASE("the MPI library says who it is in one line") {
  CHECK_FALSE(mpi_library_version().empty());
  CHECK(mpi_library_version().find('\n') == std::string::npos);
}

}  // namespace
}  // namespace k3::test
