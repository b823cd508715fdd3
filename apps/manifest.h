// What a model's files say and hold, in a form that can be kept and compared: keys, tensors, and the hash of each part.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "apps/part_hash.h"
#include "loader/parts.h"

namespace k3 {

struct ManifestTensor {
  std::string name;
  std::string type;
  std::string shape;
  std::size_t part = 0;      // index into parts
  std::uint64_t offset = 0;  // of its first byte in the part
  std::uint64_t bytes = 0;
  bool operator==(const ManifestTensor&) const = default;
};

struct Manifest {
  std::uint64_t chunk_bytes = kChunkBytes;
  std::vector<HashedPart> parts;            // without digests where nothing was hashed
  std::map<std::string, std::string> keys;  // to value_text()
  std::vector<ManifestTensor> tensors;      // in the order of the files
};

// A key's value in one line: as it is where it is short, else its type, length and SHA-256.
std::string value_text(const Value& value);

// Without hashes.
Manifest manifest_of(const ModelFile& file);

std::string manifest_json(const Manifest& manifest);
// Throws std::invalid_argument naming `file` and what is wrong with it.
Manifest parse_manifest(std::string_view text, const std::string& file);

// What differs, a line each: parts renamed, of another size, with other bytes (and in which tensors those lie), keys and
// tensors that changed, are missing or new. Empty: nothing. Bytes are compared where `now` is hashed, in chunks of `was`.
std::vector<std::string> differences(const Manifest& was, const Manifest& now);

// For a model that cannot be opened: which parts of the manifest are not in `folder`, and which file there has their bytes
// under another name, a line each. Hashes files of the right size only.
std::vector<std::string> missing_parts(const Manifest& was, const std::string& folder, int threads);

}  // namespace k3
