#include "apps/manifest.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <type_traits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/sealing.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "k3 manifest 1";
constexpr std::size_t kShortText = 60;
constexpr std::size_t kNamed = 3;  // tensors of a range that are named

void append_content(std::string& to, const Value& value);

template <class T>
void append_content(std::string& to, const std::vector<T>& items) {
  for (const T& item : items) {
    if constexpr (std::is_same_v<T, std::string>) {
      to += std::to_string(item.size()) + ":" + item;
    } else if constexpr (std::is_same_v<T, Value>) {
      append_content(to, item);
    } else {
      to.append(reinterpret_cast<const char*>(&item), sizeof(item));
    }
  }
}

// The bytes of a value, so that two arrays of one type and length differ where an element does.
void append_content(std::string& to, const Value& value) {
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, BoolArray> || std::is_same_v<T, NestedArray>) {
          append_content(to, v.items);
        } else if constexpr (std::is_same_v<T, std::string>) {
          to += v;
        } else if constexpr (std::is_arithmetic_v<T>) {
          to.append(reinterpret_cast<const char*>(&v), sizeof(v));
        } else {
          append_content(to, v);
        }
      },
      value.data);
}

std::string called(const Manifest& m, std::size_t part) {
  return fmt::format("part {} of {}", part + 1, m.parts.size());
}

// "the header", tensors, or what lies between them.
std::string contents(const Manifest& m, std::size_t part, std::uint64_t begin, std::uint64_t end) {
  std::vector<std::string> names;
  std::uint64_t first = m.parts[part].bytes;
  for (const ManifestTensor& t : m.tensors) {
    if (t.part != part) continue;
    first = std::min(first, t.offset);
    if (t.offset < end && begin < t.offset + t.bytes) names.push_back(t.name);
  }
  if (begin < first) names.insert(names.begin(), "the header");
  if (names.empty()) return "no tensor";
  const std::size_t shown = std::min(names.size(), kNamed);
  std::string out = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), ", "));
  if (names.size() > shown) out += fmt::format(" and {} more", names.size() - shown);
  return out;
}

void compare_bytes(const Manifest& was, const Manifest& now, std::size_t part,
                   std::vector<std::string>& out) {
  const HashedPart &a = was.parts[part], &b = now.parts[part];
  for (std::size_t i = 0; i < was.parts.size(); ++i) {
    if (i == part || was.parts[i].digest != b.digest) continue;
    out.push_back(
        fmt::format("{}: holds the bytes that the manifest has in {}", b.file, was.parts[i].file));
    return;
  }
  const std::size_t n = std::min(a.chunks.size(), b.chunks.size());
  for (std::size_t c = 0; c < n; ++c) {
    if (a.chunks[c] == b.chunks[c]) continue;
    const std::size_t from = c;
    while (c + 1 < n && a.chunks[c + 1] != b.chunks[c + 1]) ++c;
    const std::uint64_t begin = from * was.chunk_bytes;
    const std::uint64_t end = std::min(b.bytes, (c + 1) * was.chunk_bytes);
    out.push_back(fmt::format("{}: other bytes between {} and {}: {}", b.file, begin, end,
                              contents(now, part, begin, end)));
  }
}

void compare_parts(const Manifest& was, const Manifest& now, std::vector<std::string>& out) {
  if (was.parts.size() != now.parts.size())
    out.push_back(fmt::format("{} parts, the manifest has {}", now.parts.size(), was.parts.size()));
  for (std::size_t i = 0; i < std::min(was.parts.size(), now.parts.size()); ++i) {
    const HashedPart &a = was.parts[i], &b = now.parts[i];
    if (a.file != b.file)
      out.push_back(
          fmt::format("{}: is called {}, the manifest has {}", called(now, i), b.file, a.file));
    if (a.bytes != b.bytes)
      out.push_back(fmt::format("{}: {} bytes, the manifest has {}", b.file, b.bytes, a.bytes));
    if (!b.digest.empty() && a.digest != b.digest) compare_bytes(was, now, i, out);
  }
}

void compare_keys(const Manifest& was, const Manifest& now, std::vector<std::string>& out) {
  for (const auto& [key, value] : was.keys) {
    const auto it = now.keys.find(key);
    if (it == now.keys.end()) {
      out.push_back(fmt::format("key {}: missing, the manifest has {}", key, value));
    } else if (it->second != value) {
      out.push_back(fmt::format("key {}: {}, the manifest has {}", key, it->second, value));
    }
  }
  for (const auto& [key, value] : now.keys) {
    if (!was.keys.contains(key))
      out.push_back(fmt::format("key {}: {}, not in the manifest", key, value));
  }
}

std::string text(const ManifestTensor& t) {
  return fmt::format("{} {} in part {} at {}", t.type, t.shape, t.part + 1, t.offset);
}

void compare_tensors(const Manifest& was, const Manifest& now, std::vector<std::string>& out) {
  std::map<std::string_view, const ManifestTensor*> left;
  for (const ManifestTensor& t : now.tensors) left[t.name] = &t;
  for (const ManifestTensor& t : was.tensors) {
    const auto it = left.find(t.name);
    if (it == left.end()) {
      out.push_back(fmt::format("tensor {}: missing, the manifest has {}", t.name, text(t)));
      continue;
    }
    if (!(*it->second == t))
      out.push_back(
          fmt::format("tensor {}: {}, the manifest has {}", t.name, text(*it->second), text(t)));
    left.erase(it);
  }
  for (const auto& [name, t] : left)
    out.push_back(fmt::format("tensor {}: {}, not in the manifest", name, text(*t)));
}

void check(bool ok, const std::string& file, const std::string& what) {
  if (!ok) throw std::invalid_argument(file + ": is no manifest: " + what);
}

HashedPart part_from(const Json& j, std::uint64_t chunk_bytes, const std::string& file) {
  HashedPart p;
  p.file = j.at("file").get<std::string>();
  p.bytes = j.at("bytes").get<std::uint64_t>();
  p.digest = j.at("digest").get<std::string>();
  p.chunks = j.at("chunks").get<std::vector<std::string>>();
  check(p.chunks.size() == (p.bytes + chunk_bytes - 1) / chunk_bytes, file,
        p.file + ": not as many chunks as its size asks for");
  // So that a manifest that was edited is not taken for the file's word.
  check(std::all_of(p.chunks.begin(), p.chunks.end(),
                    [](const std::string& c) {
                      return c.size() == 64 && c.find_first_not_of("0123456789abcdef") == c.npos;
                    }) &&
            digest_of(p.chunks) == p.digest,
        file, p.file + ": its digest is not that of its chunks");
  return p;
}

}  // namespace

std::string value_text(const Value& value) {
  const std::string* text = std::get_if<std::string>(&value.data);
  if (!value.is_array() && (text == nullptr || text->size() <= kShortText)) return value.describe();
  std::string content;
  append_content(content, value);
  const std::string kind =
      text ? fmt::format("string of {} bytes", text->size()) : value.describe();
  return kind + ", sha256 " + sha256_hex(content);
}

Manifest manifest_of(const ModelFile& file) {
  Manifest m;
  for (const PartInfo& p : file.parts())
    m.parts.push_back({fs::path(p.path).filename().string(), p.bytes, "", {}});
  for (const auto& [key, value] : file.metadata().entries())
    m.keys[printable(key)] = value_text(value);
  for (const TensorInfo& t : file.tensors())
    m.tensors.push_back({t.name, traits(t.type).name, t.shape(), static_cast<std::size_t>(t.part),
                         t.offset, t.bytes});
  return m;
}

std::string manifest_json(const Manifest& m) {
  Json parts = Json::array(), keys = Json::object(), tensors = Json::array();
  for (const HashedPart& p : m.parts)
    parts.push_back(
        {{"file", p.file}, {"bytes", p.bytes}, {"digest", p.digest}, {"chunks", p.chunks}});
  for (const auto& [key, value] : m.keys) keys[key] = value;
  for (const ManifestTensor& t : m.tensors)
    tensors.push_back({{"name", t.name},
                       {"type", t.type},
                       {"shape", t.shape},
                       {"part", t.part + 1},
                       {"offset", t.offset},
                       {"bytes", t.bytes}});
  const Json all{{"format", kFormat},
                 {"chunk_bytes", m.chunk_bytes},
                 {"parts", parts},
                 {"keys", keys},
                 {"tensors", tensors}};
  return all.dump(1) + "\n";
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  try {
    const Json j = Json::parse(text);
    check(j.is_object() && j.value("format", "") == kFormat, file,
          fmt::format("expected format \"{}\"", kFormat));
    Manifest m;
    m.chunk_bytes = j.at("chunk_bytes").get<std::uint64_t>();
    check(m.chunk_bytes > 0, file, "chunk_bytes: expected 1 or more");
    for (const Json& p : j.at("parts")) m.parts.push_back(part_from(p, m.chunk_bytes, file));
    check(!m.parts.empty(), file, "no parts");
    for (const auto& [key, value] : j.at("keys").items()) m.keys[key] = value.get<std::string>();
    for (const Json& t : j.at("tensors")) {
      m.tensors.push_back({t.at("name").get<std::string>(), t.at("type").get<std::string>(),
                           t.at("shape").get<std::string>(), t.at("part").get<std::size_t>() - 1,
                           t.at("offset").get<std::uint64_t>(),
                           t.at("bytes").get<std::uint64_t>()});
    }
    return m;
  } catch (const Json::exception& e) {
    throw std::invalid_argument(file + ": is no manifest: " + printable(e.what()));
  }
}

std::vector<std::string> differences(const Manifest& was, const Manifest& now) {
  std::vector<std::string> out;
  compare_parts(was, now, out);
  compare_keys(was, now, out);
  compare_tensors(was, now, out);
  return out;
}

std::vector<std::string> missing_parts(const Manifest& was, const std::string& folder,
                                       int threads) {
  std::map<std::string, std::uint64_t> there;
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder)) {
    if (entry.is_regular_file()) there[entry.path().filename().string()] = entry.file_size();
  }
  std::vector<std::string> out;
  for (std::size_t i = 0; i < was.parts.size(); ++i) {
    const HashedPart& p = was.parts[i];
    if (there.contains(p.file)) continue;
    std::string line = fmt::format("{}: {} is missing", called(was, i), p.file);
    for (const auto& [name, bytes] : there) {
      // Taken by name: clang 14 captures no structured binding.
      const bool known =
          std::any_of(was.parts.begin(), was.parts.end(),
                      [&other = name](const HashedPart& q) { return q.file == other; });
      if (known || bytes != p.bytes) continue;
      HashOptions options;
      options.chunk_bytes = was.chunk_bytes;
      options.threads = threads;
      if (hash_parts({(fs::path(folder) / name).string()}, options).front().digest == p.digest)
        line += fmt::format("; {} has its bytes", name);
    }
    out.push_back(line);
  }
  return out;
}

}  // namespace k3
