// Hashes of a model's parts: SHA-256 of every chunk, by several threads, with a journal from which a run that was killed goes
// on. A part's digest is the SHA-256 of its chunks' digests (32 bytes each, in order), so that it can be made by many threads
// and a change can be told to the chunk; it is not what sha256sum prints of the file.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace k3 {

inline constexpr std::uint64_t kChunkBytes = std::uint64_t{64} << 20;

struct HashedPart {
  std::string file;  // without its folder
  std::uint64_t bytes = 0;
  std::string digest;               // hex
  std::vector<std::string> chunks;  // hex; the last one may be short
};

struct HashProgress {
  std::uint64_t done = 0;     // bytes, those of an earlier run included
  std::uint64_t resumed = 0;  // of them
  std::uint64_t total = 0;
};

struct HashOptions {
  std::uint64_t chunk_bytes = kChunkBytes;
  int threads = 1;
  std::string journal;  // a file beside the result; empty: none
  // Called after each chunk, by one thread at a time; what it throws ends the run, and the journal keeps what is done.
  std::function<void(const HashProgress&)> progress;
};

// Hashes the files. A journal that fits them (names, sizes, times of change, chunk size) is taken up where it ends, one that
// does not is begun anew; it stays when the call returns: remove it when the result is safe. Throws std::system_error where
// a file cannot be read or the journal not be written, std::invalid_argument where a file is no regular one, or another
// process holds the journal.
std::vector<HashedPart> hash_parts(const std::vector<std::string>& paths,
                                   const HashOptions& options);

// A part's digest from its chunks'.
std::string digest_of(std::span<const std::string> chunks);

}  // namespace k3
