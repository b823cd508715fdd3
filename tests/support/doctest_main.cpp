// The main of every test that runs as one process.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <iostream>

#include "tests/support/listener.h"

using k3::test::Listener;
REGISTER_LISTENER("cases_run", 1, Listener);

namespace k3::test {
// Why nothing can be tested here, or null. Linked beside this main: never_skip.cpp or skip_without_gpu.cpp.
const char* reason_to_skip();
}  // namespace k3::test

int main(int argc, char** argv) {
  if (const char* reason = k3::test::reason_to_skip()) {
    std::cout << "skipped: " << reason << "\n";
    return 77;
  }
  doctest::Context context(argc, argv);
  const int result = context.run();
  if (Listener::cases_run == 0 && !context.shouldExit()) {
    std::cerr << "no test case was run\n";
    return 1;
  }
  return result;
}
