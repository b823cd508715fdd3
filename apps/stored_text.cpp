#include "apps/stored_text.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/job.h"
#include "loader/h5.h"

namespace k3 {
namespace {

bool is_hdf5(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic(8, '\0');
  return path != "-" && file.read(magic.data(), 8) && magic == "\x89HDF\r\n\x1a\n";
}

StoredText read_log(const std::string& path, std::vector<std::string>& warnings) {
  const h5::Group root = h5::File::open(path).root();
  if (!root.has("tokens") || !root.has("prompt")) {
    throw std::invalid_argument(path + ": no prompt and tokens, expected a log of k3run");
  }
  if (root.has("turns") && root.open_group("turns").open("reason").rows() > 1) {
    throw std::invalid_argument(fmt::format("{}: a conversation of {} turns, expected one text",
                                            path, root.open_group("turns").open("reason").rows()));
  }
  StoredText text;
  text.prompt = root.open_group("prompt").open("id").read<std::int32_t>();
  text.ids = root.open_group("tokens").open("id").read<std::int32_t>();
  const h5::Group options = root.open_group("options");
  if (options.has_attribute("temp") && options.string_attribute("temp") != "0") {
    warnings.push_back(fmt::format("{}: was sampled at temperature {}, it is not greedy", path,
                                   options.string_attribute("temp")));
  }
  if (text.ids.empty()) throw std::invalid_argument(path + ": holds no generated tokens");
  return text;
}

}  // namespace

std::vector<StoredText> read_stored_texts(const std::string& path,
                                          std::vector<std::string>& warnings) {
  if (is_hdf5(path)) return {read_log(path, warnings)};
  const std::string where = path == "-" ? "standard input" : path;
  std::vector<StoredText> texts;
  std::istringstream lines(read_text(path));
  std::string line;
  for (int n = 1; std::getline(lines, line); ++n) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    texts.push_back({{}, parse_ids(line, fmt::format("{}: line {}", where, n))});
  }
  if (texts.empty()) throw std::invalid_argument(where + ": holds no token ids");
  return texts;
}

}  // namespace k3
