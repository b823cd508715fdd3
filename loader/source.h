// Where the bytes of a file come from: a mapped file (parts.h), memory (tests, fuzzers), or a source that fails on
// purpose (tests of I/O faults). Readers of headers see only this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace k3 {

class Source {
 public:
  virtual ~Source() = default;

  // What errors call it: a path, or "memory".
  virtual const std::string& name() const = 0;
  virtual std::uint64_t size() const = 0;

  // Fills `out` with the bytes at [offset, offset + out.size()). Throws std::invalid_argument when that passes the end,
  // std::system_error when the medium fails.
  virtual void read_at(std::uint64_t offset, std::span<std::byte> out) const = 0;

 protected:
  // Compared so that neither side can wrap.
  void check_range(std::uint64_t offset, std::uint64_t n) const {
    if (offset > size() || n > size() - offset) {
      throw std::invalid_argument(name() + ": " + std::to_string(n) + " bytes wanted at " +
                                  std::to_string(offset) + ", file has " + std::to_string(size()));
    }
  }
};

// Bytes that are already here. Does not own them.
class MemorySource : public Source {
 public:
  explicit MemorySource(std::span<const std::byte> bytes, std::string name = "memory")
      : bytes_(bytes), name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  std::uint64_t size() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    check_range(offset, out.size());
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

 private:
  std::span<const std::byte> bytes_;
  std::string name_;
};

// Passes reads on until `good_reads` of them have succeeded, then fails each as a broken disk would.
class FailingSource : public Source {
 public:
  FailingSource(const Source& inner, int good_reads) : inner_(inner), left_(good_reads) {}

  const std::string& name() const override { return inner_.name(); }
  std::uint64_t size() const override { return inner_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    if (left_ <= 0) {
      throw std::system_error(std::make_error_code(std::errc::io_error), name() + ": read");
    }
    --left_;
    inner_.read_at(offset, out);
  }

 private:
  const Source& inner_;
  mutable int left_;
};

}  // namespace k3
