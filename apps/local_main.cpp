#include "apps/local_main.h"

#include <cstdio>
#include <exception>

#include "rank/fault.h"

namespace k3 {

int local_main(const std::string& program, const std::function<int()>& body) {
  try {
    return body();
  } catch (...) {
    const Fault fault = fault_of(std::current_exception());
    print_line(program + ": " + fault.line);
    return fault.exit_code;
  }
}

void print_line(const std::string& line) {
  std::fflush(stdout);
  const std::string text = line + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace k3
