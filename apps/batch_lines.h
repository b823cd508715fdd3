// A batch's input, line by line: a file, or a pipe that is still being written to.
#pragma once

#include <cstdint>
#include <string>

namespace k3 {

struct InputLine {
  std::int64_t number = 0;  // from 1; blank lines count, but are not handed out
  std::string text;         // without its line end, LF or CRLF
  bool too_long =
      false;  // longer than the reader's limit: `text` is its beginning, the rest is passed over
  std::uint64_t hash = 0;  // of the whole line
};

class LineReader {
 public:
  enum class Outcome {
    kLine,
    kNothingYet,  // a pipe without a whole line
    kEnd,
  };
  static constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;

  // "-": standard input. Throws std::invalid_argument where there is no such file or it is a directory, std::system_error
  // where it cannot be opened.
  explicit LineReader(const std::string& path, std::size_t max_line_bytes = kMaxLineBytes);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // The next line that is not blank; a last one may lack its line end. Waits at most wait_ms for more of a pipe. Throws
  // std::system_error naming the input.
  Outcome next(InputLine& line, int wait_ms);

  // Bytes handed out so far and, of a regular file, in all (else 0): how far a batch has come.
  std::uint64_t bytes_read() const { return n_taken_; }
  std::uint64_t bytes_total() const { return total_; }
  const std::string& name() const { return name_; }

 private:
  bool fill(int wait_ms);
  bool take_line(InputLine& line, bool at_end);

  std::string name_;
  std::size_t limit_;
  int fd_ = -1;
  bool owned_ = false;
  bool ended_ = false;
  std::string buffer_;
  std::size_t at_ = 0;       // of buffer_: where the next line begins
  std::size_t scanned_ = 0;  // of buffer_: no line end before this
  bool passing_ = false;     // inside a line longer than the limit
  InputLine long_line_;
  std::int64_t number_ = 0;
  std::uint64_t n_taken_ = 0;
  std::uint64_t total_ = 0;
};

// FNV-1a, 64 bits; `seed`: the hash of what came before.
std::uint64_t line_hash(std::string_view bytes, std::uint64_t seed = 0xcbf29ce484222325ull);

}  // namespace k3
