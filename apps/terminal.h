// Rank 0's terminal: lines typed with editing and history, text as it comes, and Ctrl-C as a key.
//
// Keys come from standard input. Without a launcher that is the terminal itself. Under mpirun it is a pipe into which mpirun
// copies the keys, and the screen is the job's controlling terminal, /dev/tty. In both cases the terminal is put into a mode
// in which Ctrl-C is a byte and no signal: the processes of the terminal, mpirun among them, would die of the signal.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace k3 {

class Terminal {
 public:
  // Finds the terminal and changes nothing of it yet. Throws std::system_error where this process has none.
  Terminal();
  ~Terminal();  // the terminal is as it was
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  // What is written to standard error goes to the screen too from here on, in order with the rest, where a launcher would
  // pass it on later.
  void take_notes();
  // From here on keys are bytes, Ctrl-C too. `stopped`: asked about four times a second while a line is typed.
  void begin(std::function<bool()> stopped);

  struct Line {
    enum class Kind {
      kText,
      kCancelled,  // Ctrl-C; `text` is what stood there
      kEnd,        // Ctrl-D on an empty line, or no more keys
      kStopped,
    };
    Kind kind = Kind::kEnd;
    std::string text;  // UTF-8, without the line end
  };
  // One line after begin(). Lines with text go into the history.
  Line read_line(const std::string& prompt);

  // True once after Ctrl-C was typed while nobody read a line. Other keys wait for the next line; Ctrl-C drops them.
  bool interrupted();

  // Whole UTF-8 characters, shown as they are.
  void write(std::string_view text);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
