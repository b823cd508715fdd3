// A program like those of apps/, reduced to what ranks do to each other; faults.sh makes it fail in
// every way there is.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>

#include "comm/mpi_comm.h"

namespace {

using namespace k3;

void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void sum_for_ever(Comm& comm) {
  for (;;) {
    float x = 1;
    comm.sum(Point::kAttnOut, &x, 1, nullptr);
  }
}

void run(Comm& comm, const std::string& what) {
  const bool culprit = comm.rank() == comm.size() - 1;
  comm.barrier(Point::kStep);
  if (what == "throw") {
    if (culprit) throw std::runtime_error("model.gguf: blk.3.attn_q.weight: made to fail");
    sum_for_ever(comm);
  } else if (what == "agree") {
    std::optional<Fault> fault;
    if (comm.rank() > 0) fault = Fault{2, "blk." + std::to_string(comm.rank()) + ": made to fail"};
    comm.agree(fault);
  } else if (what == "stuck") {
    comm.set_time_limit(1);
    if (culprit) sleep_s(60);
    sum_for_ever(comm);
  } else if (what == "load" || what == "slow") {
    // Everyone loads for three times the limit, in small steps; in "load" one stands still on the way.
    comm.set_time_limit(1);
    for (std::uint64_t done = 0; done < 30; ++done) {
      comm.pulse(done, 30);
      sleep_s(culprit && what == "load" && done == 9 ? 60
              : what == "slow" && !culprit           ? 0.01
                                                     : 0.1);
    }
    comm.finish_pulses();
    comm.agree(std::nullopt);
  } else if (what == "stopped") {
    comm.set_time_limit(1);
    if (comm.rank() == 0) std::raise(SIGSTOP);
    comm.broadcast(Point::kStep, {}, 0);
  } else if (what == "idle") {
    comm.set_time_limit(0.5);
    if (comm.rank() == 0) sleep_s(2);
    comm.broadcast(Point::kStep, {}, 0);
  } else if (what == "wait") {
    std::printf("pid %d\n", getpid());
    std::fflush(stdout);
    sum_for_ever(comm);
  } else if (what == "unwind") {
    if (!culprit) sum_for_ever(comm);
  } else if (what == "fine") {
    comm.agree(std::nullopt);
  }
}

int say(const std::string& line, int exit_code) {
  std::fprintf(stderr, "%s\n", line.c_str());
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "fine";
  try {
    World world;
    const auto comm = make_mpi_comm(world);
    try {
      run(*comm, what);
    } catch (const AgreedFault& agreed) {
      if (world.rank() == 0) say(agreed.what(), 0);
      return agreed.fault().exit_code;
    } catch (const CommError& error) {
      abort_world(say(error.what(), 1));
    } catch (const std::exception& error) {
      const std::string rank = std::to_string(world.rank()) + "/" + std::to_string(world.size());
      abort_world(say("rank " + rank + ": " + error.what(), 1));
    }
    // Past the inner handler: the World itself is unwound.
    if (what == "unwind") throw std::runtime_error("never printed");
    if (world.rank() == 0) std::puts("done");
  } catch (const std::system_error& error) {
    return say(error.what(), 3);
  }
  return 0;
}
