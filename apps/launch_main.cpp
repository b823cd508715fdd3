#include "apps/launch_main.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>

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

// Says once, after a signal that asks for the end, in which call between ranks this one is stuck: whoever sent the signal
// (mpirun, because another rank died) may kill it next.
class StuckTeller {
 public:
  explicit StuckTeller(const World& world)
      : thread_([&world](const std::stop_token& stop) { watch(stop, world); }) {}

 private:
  static void watch(const std::stop_token& stop, const World& world) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kInterval{25};
    constexpr std::chrono::milliseconds kPatience{250};  // mpirun gives a second before SIGKILL
    constexpr std::chrono::milliseconds kStoppedGap{1500};
    constexpr double kStuck_s = 0.2;
    std::optional<Clock::time_point> asked;
    for (Clock::time_point now = Clock::now(); !asked || now - *asked < kPatience;) {
      std::this_thread::sleep_for(kInterval);
      if (stop.stop_requested()) return;
      const Clock::time_point before = std::exchange(now, Clock::now());
      // It was this rank that stood still (SIGSTOP): the others have something to tell.
      if (now - before > kStoppedGap) return;
      if (g_stop_asked != 0 && !asked) asked = now;
    }
    const std::optional<OpenCall> call = world.board()->open_call();
    if (!call || call->seconds < kStuck_s) return;
    const std::string device = world.board()->device();
    print_line(fmt::format("rank {}/{} ({}{}{}): asked to end while waiting, for {:.1f} s, in {}",
                           world.rank(), world.size(), world.facts().host,
                           device.empty() ? "" : ", ", device, call->seconds, call->name));
  }

  std::jthread thread_;
};

// Ranks that wait in vain for the same one find out together; the lowest speaks and ends the others before they do.
void let_lower_ranks_speak(int rank) {
  constexpr double kEach_s = 0.3, kMost_s = 3;
  std::this_thread::sleep_for(std::chrono::duration<double>(std::min(kEach_s * rank, kMost_s)));
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
  std::optional<StuckTeller> teller;
  if (world->size() > 1) teller.emplace(*world);
  try {
    const std::unique_ptr<Comm> comm = make_mpi_comm(*world);
    return body(*world, *comm);
  } catch (const AgreedFault& e) {
    if (world->rank() == 0) print_line(e.what());
    return e.fault().exit_code;
  } catch (const CommError& e) {
    teller.reset();
    let_lower_ranks_speak(world->rank());
    print_line(e.what());  // begins with the rank
    abort_world(kExitEnvironment);
  } catch (...) {
    const Fault fault = fault_of(std::current_exception());
    print_line(fmt::format("rank {}/{}: {}", world->rank(), world->size(), fault.line));
    abort_world(fault.exit_code);
  }
}

int page_main(const std::string& program, const std::function<void()>& print) {
  if (read_launch_facts().scheduler_rank.value_or(0) != 0) return kExitOk;
  return local_main(program, [&] {
    print();
    return kExitOk;
  });
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
