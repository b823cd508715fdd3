#include "apps/local_main.h"

#include <cerrno>
#include <cstdio>
#include <exception>
#include <system_error>

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

void write_out(const std::string& text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw std::system_error(errno ? errno : EIO, std::generic_category(), "standard output");
  }
}

}  // namespace k3
