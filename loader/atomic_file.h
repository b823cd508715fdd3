// A file that appears under its name only when it is whole: written as PATH.PID.tmp, then synced and renamed by
// commit().
// Destroyed without commit(), it leaves nothing and whatever PATH was stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace k3 {

class AtomicFile {
 public:
  // All members throw std::system_error naming the path; a full disk shows in write(), sync() or commit().
  // A symbolic link is followed: the file behind it is replaced. Throws std::invalid_argument where PATH is there and is
  // no regular file.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;

  void write(std::span<const std::byte> bytes);
  // Everything written is on disk. Closes the file; write() is over.
  void sync();
  void commit();  // sync() where that has not been done, and the rename

  const std::string& path() const { return path_; }

 private:
  void write_through(std::span<const std::byte> bytes);
  void flush();
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string tmp_;  // empty once renamed or moved from
  int fd_ = -1;
  std::vector<std::byte> buffer_;
};

}  // namespace k3
