#include "apps/launch_main.h"

#include <csignal>
#include <exception>
#include <optional>

#include <fmt/core.h>

#include "apps/local_main.h"
#include "rank/engine.h"
#include "rank/fault.h"

namespace k3 {
namespace {

volatile std::sig_atomic_t g_stop_asked = 0;

extern "C" void on_signal(int signal) {
  // SIGUSR1 is the scheduler's warning and may come with SIGTERM behind it: it does not count as the first.
  static volatile std::sig_atomic_t seen = 0;
  if (signal != SIGUSR1) {
    if (seen) {
      std::signal(signal, SIG_DFL);
      std::raise(signal);
    }
    seen = 1;
  }
  g_stop_asked = 1;
  Engine::request_stop();
}

}  // namespace

int rank_main(const std::string& program, const std::function<int(World&, Comm&)>& body) {
  std::optional<World> world;
  try {
    world.emplace();
  } catch (...) {
    // Singletons all fail alike; the one that the launcher calls rank 0 speaks.
    const Fault fault = fault_of(std::current_exception());
    if (read_launch_facts().scheduler_rank.value_or(0) == 0)
      print_line(program + ": " + fault.line);
    return fault.exit_code;
  }
  try {
    const std::unique_ptr<Comm> comm = make_mpi_comm(*world);
    return body(*world, *comm);
  } catch (const AgreedFault& e) {
    if (world->rank() == 0) print_line(e.what());
    return e.fault().exit_code;
  } catch (const CommError& e) {
    print_line(e.what());  // begins with the rank
    abort_world(kExitEnvironment);
  } catch (...) {
    const Fault fault = fault_of(std::current_exception());
    print_line(fmt::format("rank {}/{}: {}", world->rank(), world->size(), fault.line));
    abort_world(fault.exit_code);
  }
}

void on_rank_0(Comm& comm, const std::function<void()>& work) {
  together(comm, [&] {
    if (comm.rank() == 0) work();
  });
}

void stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
  for (int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}

bool stop_asked() noexcept { return g_stop_asked != 0; }

}  // namespace k3
