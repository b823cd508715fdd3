// Greedy texts that were stored: logs of k3run, or files of ids.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace k3 {

struct StoredText {
  std::vector<std::int32_t> prompt;  // empty: not stored
  std::vector<std::int32_t> ids;     // what was generated
};

// An HDF5 log holds one text, with its prompt; in any other file each line that is not blank is one: ids between blanks. A line
// about what makes the comparison doubtful (a text that was sampled) goes to `warnings`. Throws std::invalid_argument naming
// the file where it holds nothing of the kind; std::system_error where it cannot be read.
std::vector<StoredText> read_stored_texts(const std::string& path,
                                          std::vector<std::string>& warnings);

}  // namespace k3
