// A plain parallel read of byte ranges of files: what loading is held against. And what of a file the page cache holds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rank/bench_math.h"

namespace k3 {

struct RawRead {
  std::uint64_t bytes = 0;
  double seconds = 0;
};

// Reads the extents of `paths` (FileExtent::part counts in them) into scratch memory with `n_thread` threads, 8 MiB at
// a time, and drops the bytes. Throws std::system_error naming the file.
RawRead raw_read(const std::vector<std::string>& paths, const std::vector<FileExtent>& extents,
                 int n_thread);

// Share of the files' pages that the page cache holds now, 0 to 1. Nothing where the system does not say. The kernel
// answers truly only who owns the file or may write to it; everybody else is told that all of it is there.
std::optional<double> cached_share(const std::vector<std::string>& paths);

// Asks the kernel to drop the files from the page cache. Pages that some process has mapped, or that are not yet on the
// disk, stay; file systems in memory keep everything. Throws std::system_error naming the file.
void evict(const std::vector<std::string>& paths);

}  // namespace k3
