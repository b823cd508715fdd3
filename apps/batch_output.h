// A batch's output: lines that are on the disk once commit() has returned, and what an earlier run left there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace k3 {

// Which lines of the input are answered, and the hash that each had then. 8 bytes a line.
class DoneLines {
 public:
  bool has(std::int64_t line) const;
  // Throws std::invalid_argument where the line has one already.
  void add(std::int64_t line, std::uint64_t hash);
  std::uint64_t hash(std::int64_t line) const { return hashes_.at(static_cast<std::size_t>(line)); }
  std::int64_t count() const { return n_; }

 private:
  std::vector<std::uint64_t> hashes_;  // by line number; 0: not answered
  std::int64_t n_ = 0;
};

class BatchOutput {
 public:
  // "-": standard output, where nothing can be resumed. Otherwise the file is created, and locked as long as this lives: two
  // jobs do not write the same one. One that holds anything is refused unless `resume`; then a last line without its end, which
  // a kill may leave, is cut off, and the others go to done(). Throws std::invalid_argument for all of that and for a line that
  // is not of a batch's output, std::system_error for what the system refuses.
  BatchOutput(const std::string& path, bool resume);
  ~BatchOutput();
  BatchOutput(const BatchOutput&) = delete;
  BatchOutput& operator=(const BatchOutput&) = delete;

  const DoneLines& done() const { return done_; }
  std::int64_t n_failed_before() const { return n_failed_; }
  std::uint64_t bytes_cut() const { return n_cut_; }

  // `json`: one line without its end; written by commit().
  void add(const std::string& json);
  // Writes and syncs what was added: all of it is on the disk, or the file is cut back to where it was before and
  // std::system_error thrown (a full disk).
  void commit();

 private:
  void open(const std::string& path, bool resume);
  void read_back();
  void read_line(std::string_view line, std::int64_t number);
  [[noreturn]] void fail(int error, const char* what) const;

  std::string path_;
  int fd_ = -1;
  bool is_file_ = false;
  std::uint64_t size_ = 0;  // of the file, up to the last line's end
  std::uint64_t n_cut_ = 0;
  std::int64_t n_failed_ = 0;
  std::string pending_;
  DoneLines done_;
};

}  // namespace k3
