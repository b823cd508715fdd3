// The main of tests that run on several ranks. A case that fails on one rank leaves the others waiting in a collective,
// so a listener ends the world at once. Rank 0 speaks for success; a rank that fails shows its own report.
#define DOCTEST_CONFIG_IMPLEMENT
// The SIGTERM that mpirun sends to the others is not a failure of theirs and must not bury the first report.
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS
#include <doctest/doctest.h>

#include <mpi.h>

#include <iostream>
#include <sstream>

#include "tests/support/listener.h"

namespace {

int my_rank = 0;
std::ostringstream report;

struct AbortOnFailure : k3::test::Listener {
  using Listener::Listener;
  // Said before the case runs: after a timeout the last line names the case that hung.
  void test_case_start(const doctest::TestCaseData& data) override {
    if (my_rank == 0) std::cout << "case: " << data.m_name << std::endl;
  }
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    if (stats.failure_flags == doctest::TestCaseFailureReason::None) return;
    std::cerr << "rank " << my_rank << " failed:\n" << report.str() << std::endl;
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
};

}  // namespace

REGISTER_LISTENER("abort_on_failure", 1, AbortOnFailure);

namespace k3::test {
// Why nothing can be tested here, or null. Linked beside this main.
const char* reason_to_skip();
}  // namespace k3::test

int main(int argc, char** argv) {
  if (const char* reason = k3::test::reason_to_skip()) {
    std::cout << "skipped: " << reason << "\n";
    return 77;
  }
  int provided = 0;
  if (MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) return 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
  doctest::Context context(argc, argv);
  context.setOption("no-colors", true);
  context.setCout(&report);
  int result = context.run();
  if (AbortOnFailure::cases_run == 0 && !context.shouldExit()) {
    std::cerr << "no test case was run\n";
    result = 1;
  }
  if (my_rank == 0) std::cout << report.str() << std::flush;
  // A failure that no case owns (none ran) still has to end the ranks that disagree.
  if (result != 0) MPI_Abort(MPI_COMM_WORLD, result);
  MPI_Finalize();
  return result;
}
