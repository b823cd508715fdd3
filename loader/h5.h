// HDF5 files through move-only handles. Used by run logs, benchmarks and goldens. No HDF5 type appears here.
//
// A file is either on disk or in memory. An in-memory file reaches the disk by snapshot(): image to PATH.PID.tmp, fsync,
// rename. So PATH is a whole file at every moment, whatever kills the process, and a full disk leaves the last one.
//
// Strings are stored as UTF-8 of variable length; a zero byte ends them. Numbers are stored little-endian.
// Errors are one line, with HDF5's own innermost message: std::invalid_argument where a file lacks or contradicts what is
// asked of it, std::system_error where writing fails. Objects of one file belong to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace k3::h5 {

// Owns one HDF5 identifier (hid_t, 64 bits since 1.10).
class Handle {
 public:
  Handle() = default;
  explicit Handle(std::int64_t id) : id_(id) {}
  ~Handle() { close(); }
  Handle(Handle&& other) noexcept : id_(other.id_) { other.id_ = -1; }
  Handle& operator=(Handle&& other) noexcept;
  std::int64_t id() const { return id_; }

 private:
  void close() noexcept;
  std::int64_t id_ = -1;
};

// The types T below: float, double, std::int32_t, std::int64_t, std::uint64_t, std::string.

// A dataset of one or more axes, row-major. A row is everything below the first axis. Appendable ones grow by rows.
class Dataset {
 public:
  std::vector<std::uint64_t> dims() const;
  std::uint64_t rows() const;
  std::uint64_t cols() const;  // elements of a row; 1 for a 1-D dataset

  // Adds whole rows: values.size() must be a multiple of cols(). Throws std::invalid_argument otherwise or when the dataset
  // cannot grow.
  template <class T>
  void append(std::span<const T> values);

  // Everything, row after row. Numbers are converted where T can hold them exactly by kind (HDF5's rules).
  template <class T>
  std::vector<T> read() const;

 private:
  friend class Group;
  Dataset(Handle handle, std::string label)
      : handle_(std::move(handle)), label_(std::move(label)) {}
  Handle handle_;
  std::string label_;  // "run.h5: tokens", for errors
};

class Group {
 public:
  // A child group, made when it is not there. `name` may be a path "a/b".
  Group group(std::string_view name);
  Group open_group(std::string_view name) const;  // must be there
  bool has(std::string_view name) const;          // a child group or dataset
  std::vector<std::string> names() const;         // children, by name

  // Sets or replaces an attribute.
  void set(std::string_view name, std::string_view value);
  void set(std::string_view name, const char* value) { set(name, std::string_view(value)); }
  void set(std::string_view name, double value);
  void set(std::string_view name, std::int64_t value);
  void set(std::string_view name, int value) { set(name, static_cast<std::int64_t>(value)); }
  void set(std::string_view name, std::uint64_t value);
  void set(std::string_view name, const std::vector<std::string>& values);
  void set(std::string_view name, const std::vector<double>& values);
  void set(std::string_view name, const std::vector<std::int64_t>& values);

  bool has_attribute(std::string_view name) const;
  std::string string_attribute(std::string_view name) const;
  double double_attribute(std::string_view name) const;
  std::int64_t int_attribute(std::string_view name) const;
  std::vector<std::string> strings_attribute(std::string_view name) const;
  std::vector<double> doubles_attribute(std::string_view name) const;
  std::vector<std::int64_t> ints_attribute(std::string_view name) const;

  // Writes a whole dataset, replacing one of that name: 1-D, or 2-D [values.size() / cols, cols].
  template <class T>
  void write(std::string_view name, std::span<const T> values);
  template <class T>
  void write(std::string_view name, std::span<const T> values, std::uint64_t cols);

  // An empty dataset that grows: 1-D when cols is 0, else [0, cols]. chunk_rows: rows per chunk on disk.
  template <class T>
  Dataset create(std::string_view name, std::uint64_t cols = 0, std::uint64_t chunk_rows = 1024);
  Dataset open(std::string_view name) const;

 private:
  friend class File;
  Group(Handle handle, std::string label) : handle_(std::move(handle)), label_(std::move(label)) {}
  std::string label_of(std::string_view name) const;
  Handle handle_;
  std::string label_;
};

class File {
 public:
  static File create(const std::string& path);  // on disk, replacing what is there
  static File open(const std::string& path);    // on disk, read-only
  // In memory; `name` is what errors call it.
  static File create_in_memory(const std::string& name);

  Group root() const;
  void flush();
  // Writes the file as it is now to `path`, atomically. Works for in-memory and on-disk files.
  void snapshot(const std::string& path) const;
  std::uint64_t bytes() const;  // size of the image

 private:
  File(Handle handle, std::string name) : handle_(std::move(handle)), name_(std::move(name)) {}
  Handle handle_;
  std::string name_;
};

}  // namespace k3::h5
