// k3plan check-node: what would make a job on these ranks fail, hang or crawl, in one sentence each. The one command of k3plan
// that speaks MPI: started by mpirun or srun as the job will be, it sees what the job's ranks would.
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <span>

#include <fmt/format.h>

#include "apps/build_info.h"
#include "apps/launch_main.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "apps/plan_commands.h"
#include "comm/mpi_use.h"
#include "comm/nccl_comm.h"
#include "kernels/cpu/places.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/node_check.h"

namespace k3 {
namespace {

constexpr const char* kSynopsis = R"(k3plan check-node [options]
mpirun -n P k3plan check-node --model FILE --backend cuda)";

constexpr const char* kAbout =
    R"(Says what would make a job fail, hang or crawl: start it as the job will be started. Looked at, on
every host: versions of k3, MPI, its transport, NCCL and the GPU driver (they must be the same), the
clocks, /dev/shm, limits on pinned memory and open files, networks (an address that two hosts have, no
network that all have), the CPUs that the launcher left to the ranks, and with --model whether every
rank sees the same file. With --backend cuda also each GPU: memory that somebody holds, clocks held
down, memory errors, MIG, memory of other GPUs that it cannot read, one GPU for two ranks, CPUs far
from it. Then rank 0 and the first rank of every other host send each other messages, and the line says
which network carried them.

Each fault is one line on standard output that begins with "fault: ". Nothing is changed.
)";

constexpr const char* kExamples =
    R"(  k3plan check-node
  launch/mpirun.sh -H node1:8,node2:8 -n 16 k3plan check-node --backend cuda --model K3-00001-of-00014.gguf
)";

struct Request {
  RunConfig run;
  NodeCheckRequest check;
};

void add_options(Options& o, Request& q) {
  o.group("What the job will be");
  o.text("--model", "FILE", q.run.model, "The model it reads. [default: models are not looked at]");
  o.text("--backend", "NAME", q.run.backend, "Where the arithmetic runs: cpu or cuda.");
  o.flag("--share-gpu", q.check.share_gpu, "Several ranks a GPU are meant.");
  o.number("--time-limit", "SECONDS", q.run.time_limit_s,
           "A rank that waits longer than this for the others ends the check.");
}

void parse(Options& options, const std::vector<std::string>& args, Request& q) {
  options.parse(args);
  if (q.run.backend != "cpu" && q.run.backend != "cuda")
    throw std::invalid_argument("--backend " + q.run.backend + ": valid: cpu, cuda");
  q.check.gpus = q.run.backend == "cuda";
}

std::vector<int> my_cpus() {
  std::vector<int> out;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return out;
  for (int c = 0; c < CPU_SETSIZE; ++c) {
    if (CPU_ISSET(c, &set)) out.push_back(c);
  }
  return out;
}

void look_at_model(const std::string& path, NodeReport& report) {
  if (path.empty()) return;
  try {
    report.model = ModelFile::open(path).fingerprint();
  } catch (...) {
    report.model_trouble = fault_of(std::current_exception()).line;
  }
}

NodeReport look(const Request& q, World& world) {
  NodeReport r;
  r.host = world.facts().host;
  r.version = std::string(build_info().version) + " (" + build_info().commit + ")";
  r.mpi = mpi_library_version();
  r.mpi = r.mpi.substr(0, r.mpi.find(','));
  r.transport = mpi_transport(world);
  r.nccl = nccl_library_version();
  const LocalGroup local = local_group(world);
  r.local_rank = local.rank;
  r.local_size = local.size;
  r.cpus = my_cpus();
  for (const std::vector<int>& core : cpu::machine_cores())
    r.machine_cpus += static_cast<int>(core.size());
  r.status = host_status();
  r.gpu = gpu_report();
  // One shown to each rank, or one list shown to all.
  const auto n = static_cast<int>(r.gpu.gpus.size());
  if (n > 0) {
    const auto mine = static_cast<std::size_t>(n == 1 ? 0 : local.rank % n);
    r.gpu_cpus = cpu::cpus_near(r.gpu.gpus[mine].bus_id);
  }
  look_at_model(q.run.model, r);
  return r;
}

// ---- between hosts --------------------------------------------------------------------------------------------------

constexpr int kRoundTrips = 200;
constexpr std::size_t kLargeFloats = std::size_t{1} << 20;
constexpr int kLargeMessages = 8;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One side of the talk of two ranks; the first one's times count.
LinkTest talk(Comm& comm, int from, int to) {
  LinkTest test{from, to, 0, 0, 0, {}};
  std::vector<float> data(kLargeFloats);
  const bool first = comm.rank() == from;
  const int peer = first ? to : from;
  const auto turn = [&](std::size_t count) {
    for (int step = 0; step < 2; ++step) {
      if ((step == 0) == first) {
        comm.send(Point::kStageHandOff, data.data(), count, peer, nullptr);
      } else {
        comm.recv(Point::kStageHandOff, data.data(), count, peer, nullptr);
      }
    }
  };
  turn(kLargeFloats);  // connections are made when they are first used
  const std::vector<NetCounter> before = net_counters();
  std::array<double, kRoundTrips> times{};
  for (double& t : times) {
    const auto begin = std::chrono::steady_clock::now();
    turn(1);
    t = seconds_since(begin);
  }
  std::nth_element(times.begin(), times.begin() + kRoundTrips / 2, times.end());
  test.latency_us = 1e6 * times[kRoundTrips / 2] / 2;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kLargeMessages; ++i) turn(kLargeFloats);
  const double bytes = 2.0 * kLargeMessages * kLargeFloats * sizeof(float);
  test.gb_s = bytes / seconds_since(begin) / 1e9;
  test.moved_bytes = bytes;
  for (const NetCounter& after : net_counters()) {
    const auto old = std::find_if(before.begin(), before.end(),
                                  [&](const NetCounter& b) { return b.name == after.name; });
    if (old != before.end()) test.carried.push_back({after.name, after.bytes - old->bytes});
  }
  return test;
}

// Rank 0 and the first rank of every other host, one after the other.
std::vector<LinkTest> test_links(World& world, Comm& comm) {
  std::array<char, 128> mine{};
  world.facts().host.copy(mine.data(), mine.size() - 1);
  const auto hosts = comm.all_gather_bytes(Point::kRunConfig, std::as_bytes(std::span(mine)));
  std::vector<LinkTest> tests;
  for (std::size_t r = 1; r < hosts.size(); ++r) {
    if (std::find(hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(r), hosts[r]) !=
        hosts.begin() + static_cast<std::ptrdiff_t>(r)) {
      continue;
    }
    const auto to = static_cast<int>(r);
    if (comm.rank() == 0 || comm.rank() == to) tests.push_back(talk(comm, 0, to));
    comm.barrier(Point::kAgree);
  }
  return tests;
}

// ---- the command ----------------------------------------------------------------------------------------------------

// Prints on rank 0 and returns the number of faults there.
int tell(const std::vector<std::vector<std::byte>>& reports, const std::vector<LinkTest>& links,
         const Request& q) {
  std::vector<NodeReport> ranks;
  for (const std::vector<std::byte>& bytes : reports) {
    ranks.push_back(node_report_from_json(
        std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())));
  }
  std::string out;
  for (const std::string& line : node_summary(ranks)) out += line + "\n";
  for (const LinkTest& test : links) out += link_line(ranks, test) + "\n";
  const std::vector<std::string> faults = node_faults(ranks, q.check);
  for (const std::string& fault : faults) out += "fault: " + fault + "\n";
  write_out(out + (faults.empty() ? "no fault found\n" : ""));
  return static_cast<int>(std::ssize(faults));
}

int check(const std::vector<std::string>& args, World& world, Comm& comm) {
  Request q;
  q.run.time_limit_s = 30;
  together(comm, [&] {
    Options options({"k3plan check-node", kSynopsis, kAbout, kExamples});
    add_options(options, q);
    parse(options, args, q);
  });
  comm.set_time_limit(q.run.time_limit_s);
  NodeReport mine;
  together(comm, [&] { mine = look(q, world); });
  // Ranks leave together() at nearly the same moment.
  mine.unix_s =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::vector<LinkTest> links = test_links(world, comm);
  const std::string json = to_json(mine);
  const auto reports = comm.gather_bytes(Point::kResidency, std::as_bytes(std::span(json)), 0);
  int n_fault = 0;
  on_rank_0(comm, [&] { n_fault = tell(reports, links, q); });
  comm.broadcast(Point::kAgree, std::as_writable_bytes(std::span(&n_fault, 1)), 0);
  return n_fault == 0 ? kExitOk : kExitEnvironment;
}

}  // namespace

int plan_check_node(const std::vector<std::string>& args) {
  if (asks_for_page(args)) {
    return page_main("k3plan", [&] {
      Request q;
      Options options({"k3plan check-node", kSynopsis, kAbout, kExamples});
      add_options(options, q);
      const auto outcome = options.parse(args);
      write_out(outcome == Options::Outcome::kHelp ? options.help()
                                                   : version_text("k3plan") + "\n");
    });
  }
  return rank_main("k3plan", [&](World& world, Comm& comm) { return check(args, world, comm); });
}

}  // namespace k3
