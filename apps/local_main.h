// The frame of a main without ranks: from exceptions to one line and an exit code.
#pragma once

#include <functional>
#include <string>

namespace k3 {

// Runs `body`; an exception becomes "PROGRAM: line" on stderr and its exit code (rank/fault.h).
int local_main(const std::string& program, const std::function<int()>& body);

// One line to stderr in one write, so that lines of several processes do not mix; stdout is flushed first.
void print_line(const std::string& line);

// `text` to standard output, now. Its errors count (a full disk, a closed pipe): throws std::system_error.
void write_out(const std::string& text);

}  // namespace k3
