#include "rank/node_check.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace k3 {
namespace {

NetInterface on(const std::string& name, const std::string& address, const std::string& subnet) {
  NetInterface i;
  i.name = name;
  i.address = address;
  i.prefix = 24;
  i.subnet = subnet;
  return i;
}

// A rank of two on its host, nothing wrong.
NodeReport rank_on(int host, int local) {
  NodeReport r;
  r.host = "node" + std::to_string(host);
  r.version = "0.1.0 (abc)";
  r.mpi = "Open MPI v4.1.4";
  r.transport = "ob1 over self, tcp, vader";
  r.local_rank = local;
  r.local_size = 2;
  r.cpus.resize(8);
  std::iota(r.cpus.begin(), r.cpus.end(), 0);
  r.machine_cpus = 8;
  r.unix_s = 1e9;
  r.model = "0123";
  r.status.shm_bytes = r.status.shm_free_bytes = std::uint64_t{1} << 30;
  r.status.memlock_bytes = ~std::uint64_t{0};
  r.status.open_files = 1 << 20;
  r.status.interfaces = {on("eth0", "10.0.0." + std::to_string(host), "10.0.0.0/24")};
  r.gpu.driver = "550.54.15";
  for (int i = 0; i < 2; ++i) {
    GpuStatus g;
    g.index = i;
    g.bus_id = "00000000:0" + std::to_string(i + 1) + ":00.0";
    g.memory_bytes = std::uint64_t{140} << 30;
    g.used_bytes = std::uint64_t{1} << 29;
    g.most_sm_mhz = g.application_mhz = 1980;
    r.gpu.gpus.push_back(g);
  }
  return r;
}

std::vector<NodeReport> four() {
  return {rank_on(1, 0), rank_on(1, 1), rank_on(2, 0), rank_on(2, 1)};
}

// The faults of four ranks on two hosts after `change` to those of the second host.
template <class F>
std::vector<std::string> after(F&& change, NodeCheckRequest request = {.gpus = true}) {
  std::vector<NodeReport> ranks = four();
  for (std::size_t r = 2; r < 4; ++r) change(ranks[r]);
  return node_faults(ranks, request);
}

#define CHECK_FAULT(change, line)      \
  do {                                 \
    const auto faults = after(change); \
    REQUIRE(faults.size() == 1);       \
    CHECK(faults[0] == (line));        \
  } while (false)

}  // namespace

TEST_CASE("ranks on which all is well have no faults") {
  CHECK(node_faults(four(), {.gpus = true}).empty());
  CHECK(node_faults({}, {}).empty());
}

TEST_CASE("a report survives its way to rank 0") {
  const NodeReport r = rank_on(3, 1);
  CHECK(to_json(node_report_from_json(to_json(r))) == to_json(r));
  CHECK(node_report_from_json(to_json(r)).gpu.gpus[1].bus_id == "00000000:02:00.0");
  CHECK_THROWS_AS(node_report_from_json("{}"), std::invalid_argument);
}

TEST_CASE("hosts that differ are told by both their values") {
  CHECK_FAULT([](NodeReport& r) { r.gpu.driver = "535.1"; },
              "node2: the GPU driver is 535.1, on node1 it is 550.54.15: they must be the same");
  CHECK_FAULT([](NodeReport& r) { r.version = "0.1.0 (def)"; },
              "node2: k3 is 0.1.0 (def), on node1 it is 0.1.0 (abc): they must be the same");
  CHECK_FAULT([](NodeReport& r) { r.mpi = ""; },
              "node2: MPI is none, on node1 it is Open MPI v4.1.4: they must be the same");
  CHECK_FAULT([](NodeReport& r) { r.nccl = "NCCL 2.28"; },
              "node2: NCCL is NCCL 2.28, on node1 it is none: they must be the same");
  CHECK_FAULT([](NodeReport& r) { r.transport = "ucx"; },
              "node2: the MPI transport is ucx, on node1 it is ob1: they must be the same");
  CHECK(after([](NodeReport& r) { r.transport = "ob1 over self, tcp"; }).empty());
  CHECK_FAULT([](NodeReport& r) { r.unix_s -= 7.25; },
              "node2: its clock is 7.2 s behind that of node1: logs will not agree");
  CHECK(after([](NodeReport& r) { r.unix_s += 1; }).empty());
}

TEST_CASE("limits that are too small are told with what is needed") {
  CHECK_FAULT([](NodeReport& r) { r.status.shm_free_bytes = 64 << 20; },
              "node2: /dev/shm has 64 MiB free of 1024, 2 ranks may need 128: free it or make it "
              "larger (docker run --shm-size)");
  CHECK_FAULT(
      [](NodeReport& r) {
        r.status.rdma = {"mlx5_0"};
        r.status.memlock_bytes = 8 << 20;
      },
      "node2: a process may lock 8.0 MiB of memory, mlx5_0 needs more: ulimit -l unlimited "
      "(docker run --ulimit memlock=-1)");
  CHECK(after([](NodeReport& r) { r.status.memlock_bytes = 8 << 20; }).empty());
  CHECK_FAULT([](NodeReport& r) { r.status.open_files = 256; },
              "node2: a process may have 256 files open, expected 1024 or more: ulimit -n 1024");
}

TEST_CASE("networks that cannot join the hosts, or that mislead, are told") {
  CHECK_FAULT([](NodeReport& r) { r.status.interfaces = {on("eth0", "10.9.0.2", "10.9.0.0/24")}; },
              "no network has all 2 hosts: 10.0.0.0/24 (node1), 10.9.0.0/24 (node2)");
  std::vector<NodeReport> ranks = four();
  for (NodeReport& r : ranks) {
    NetInterface docker = on("docker0", "172.17.0.1", "172.17.0.0/24");
    docker.is_virtual = true;
    r.status.interfaces.push_back(docker);
  }
  const auto faults = node_faults(ranks, {});
  REQUIRE(faults.size() == 1);
  CHECK(faults[0] ==
        "node2: docker0 has the address 172.17.0.1, which node1 has too: keep MPI and NCCL off it "
        "(launch/mpirun.sh --if NAME names the right one)");
  // One host needs no network.
  ranks.resize(2);
  for (NodeReport& r : ranks) r.status.interfaces.clear();
  CHECK(node_faults(ranks, {}).empty());
}

TEST_CASE("each fault of a GPU has its sentence") {
  const auto gpu = [](auto change) { return [change](NodeReport& r) { change(r.gpu.gpus[1]); }; };
  const std::string name = "node2: GPU 1 (00000000:02:00.0): ";
  CHECK_FAULT(gpu([](GpuStatus& g) {
                g.used_bytes = std::uint64_t{41} << 30;
                g.processes = {{4711, 1}, {4712, 2}};
              }),
              name + "41.0 of 140.0 GiB are in use already, of process 4711 4712");
  CHECK_FAULT(gpu([](GpuStatus& g) { g.used_bytes = std::uint64_t{41} << 30; }),
              name + "41.0 of 140.0 GiB are in use already, of processes that are not shown here");
  CHECK_FAULT(gpu([](GpuStatus& g) {
                g.sm_mhz = 345;
                g.slowed_by = {"heat", "power brake"};
              }),
              name + "held at 345 MHz of 1980 by heat, power brake");
  CHECK_FAULT(gpu([](GpuStatus& g) { g.application_mhz = 1200; }),
              name + "set to 1200 MHz, it can do 1980 (nvidia-smi -rac)");
  CHECK_FAULT(gpu([](GpuStatus& g) { g.ecc_errors = 3; }),
              name +
                  "3 memory errors that could not be corrected: results may be wrong; have it "
                  "reset");
  CHECK_FAULT(gpu([](GpuStatus& g) { g.split = true; }),
              name + "split (MIG): its parts cannot read each other's memory");
  CHECK_FAULT(gpu([](GpuStatus& g) {
                g.no_peer = {0, 3};
              }),
              name + "cannot read the memory of GPU 0, 3 directly: --comm peer will not do");
}

TEST_CASE(
    "GPUs that are missing or too few are told where the job is to use them, and only there") {
  const auto no_driver = [](NodeReport& r) { r.gpu = {}; };
  CHECK(after(no_driver).size() == 2);  // it differs, too
  CHECK(after(no_driver).back() == "node2: no GPU driver (libnvidia-ml.so.1 is not there)");
  const auto one = [](NodeReport& r) { r.gpu.gpus.pop_back(); };
  CHECK_FAULT(one, "node2: 2 ranks, 1 GPUs: start at most one rank a GPU");
  CHECK(after(one, {.gpus = true, .share_gpu = true}).empty());
  CHECK(after(one, {.gpus = false}).empty());
  CHECK_FAULT([](NodeReport& r) { r.gpu.trouble = "Driver/library version mismatch"; },
              "node2: the GPU driver does not answer: Driver/library version mismatch");
}

TEST_CASE("ranks without CPUs enough, or far from their GPU, are told") {
  CHECK_FAULT(
      [](NodeReport& r) { r.cpus = {r.local_rank}; },
      "node2: its ranks may use 2 of 8 CPUs: the launcher bound them; mpirun --bind-to none, or "
      "sbatch --cpus-per-task");
  const auto one_cpu = after([](NodeReport& r) { r.cpus = {0}; });
  REQUIRE(one_cpu.size() == 2);
  CHECK(one_cpu[0] == "node2: 2 ranks may use 1 CPUs together: they wait for each other's CPU");
  const auto far = [](NodeReport& r) {
    r.cpus = r.local_rank == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{4, 5, 6, 7};
    r.gpu_cpus = {0, 1, 2, 3};
  };
  CHECK_FAULT(
      far, "rank 3/4 (node2): its GPU is near CPUs 0 to 3, and the launcher gave it none of them");
}

TEST_CASE("a model that a rank does not see, or that is another, is told with the rank") {
  CHECK(after([](NodeReport& r) { r.model = "4567"; }).size() == 2);
  CHECK(after([](NodeReport& r) { r.model = "4567"; })[1] ==
        "rank 3/4 (node2): its model has the fingerprint 4567, that of rank 0 has 0123: they are "
        "other files");
  std::vector<NodeReport> ranks = four();
  ranks[0].model = "";
  ranks[0].model_trouble = "model.gguf: no such file";
  CHECK(node_faults(ranks, {}) ==
        std::vector<std::string>{"rank 0/4 (node1): model.gguf: no such file"});
}

TEST_CASE("a link names the network whose counters rose") {
  const LinkTest test{0, 2, 45.12, 0.934, 1e6, {{"lo", 1000000}, {"eth0", 1012345}, {"eth1", 900}}};
  CHECK(link_line(four(), test) ==
        "rank 0/4 (node1) - rank 2/4 (node2): 45.1 us, 0.93 GB/s, over eth0");
  const LinkTest silent{0, 2, 1, 9, 1e6, {{"eth0", 100}}};
  CHECK(link_line(four(), silent).ends_with(", over memory or a device that counts nothing"));
}

TEST_CASE("the driver's library is asked through its own interface") {
  // The test is started with a stand-in of two GPUs in the library's place.
  const GpuReport report = gpu_report();
  CHECK(report.driver == "550.54.15");
  CHECK(report.trouble.empty());
  REQUIRE(report.gpus.size() == 2);
  NodeReport host = rank_on(1, 0);
  host.local_size = 1;
  host.gpu = report;
  const auto faults = node_faults({host}, {.gpus = true});
  REQUIRE(faults.size() == 6);
  const std::string name = "node1: GPU 1 (00000000:AA:00.0): ";
  CHECK(faults[0] == name + "41.0 of 140.0 GiB are in use already, of process 4711");
  CHECK(faults[1] == name + "held at 345 MHz of 1980 by heat");
  CHECK(faults[2] == name + "set to 1200 MHz, it can do 1980 (nvidia-smi -rac)");
  CHECK(faults[3].starts_with(name + "3 memory errors"));
  CHECK(faults[4].starts_with(name + "split (MIG)"));
  CHECK(faults[5].starts_with(name + "cannot read the memory of GPU 0"));
}

}  // namespace k3
