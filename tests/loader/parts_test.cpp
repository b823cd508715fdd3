#include "loader/parts.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sstream>

#include "loader/gguf_writer.h"
#include "tests/loader/gguf_bytes.h"
#include "tests/support/resident.h"

namespace k3 {

using test::has;
using test::read_bytes;
using test::refusal_of;
using test::TempDir;
using test::write_bytes;

namespace {

const std::string kModels = K3_TEST_DATA "/models/";

std::string part_name(int part, int count = 3) { return split_path("k3-split3-f32", part, count); }

void copy_set(const TempDir& dir) {
  for (int part = 1; part <= 3; ++part) {
    std::filesystem::copy_file(kModels + part_name(part), dir / part_name(part));
  }
}

std::string open_refusal(const std::string& path, OpenOptions options = {}) {
  return refusal_of([&] { ModelFile::open(path, options); });
}

// A set of `count` parts with one F32 tensor each; the caller spoils what it likes.
struct Part {
  MetadataEntries metadata;
  std::vector<TensorDecl> tensors;
};

std::vector<Part> make_set(int count) {
  std::vector<Part> set;
  for (int i = 0; i < count; ++i) {
    Part p;
    if (i == 0) p.metadata.emplace_back("general.architecture", "kimi-k3");
    p.metadata.emplace_back("split.no", static_cast<std::uint16_t>(i));
    p.metadata.emplace_back("split.count", static_cast<std::uint16_t>(count));
    p.metadata.emplace_back("split.tensors.count", static_cast<std::int32_t>(count));
    p.tensors.push_back({"t" + std::to_string(i), BlockType::kF32, {8}});
    set.push_back(p);
  }
  return set;
}

void write_set(const TempDir& dir, const std::vector<Part>& set) {
  const int count = static_cast<int>(set.size());
  for (int i = 0; i < count; ++i) {
    const Part& p = set[static_cast<std::size_t>(i)];
    write_gguf(split_path(dir / "m", i + 1, count), p.metadata, p.tensors, {},
               [&](std::size_t, const TensorDecl& t, const Put& put) {
                 put(std::vector<std::byte>(t.bytes(), static_cast<std::byte>(i + 1)));
               });
  }
}

std::string set_refusal(const std::vector<Part>& set, OpenOptions options = {}) {
  const TempDir dir;
  write_set(dir, set);
  return open_refusal(dir / split_path("m", 1, static_cast<int>(set.size())), options);
}

}  // namespace

TEST_CASE("split names are taken apart and put together") {
  const auto name = parse_split_name("dir/K3-UD-00002-of-00014.gguf");
  REQUIRE(name.has_value());
  CHECK(name->prefix == "dir/K3-UD");
  CHECK(name->part == 2);
  CHECK(name->count == 14);
  CHECK(split_path(name->prefix, 14, 14) == "dir/K3-UD-00014-of-00014.gguf");
  for (const char* other :
       {"m.gguf", "m-0002-of-0014.gguf", "m-00002-of-00014.ggu", "m-00015-of-00014.gguf",
        "m-00000-of-00014.gguf", "m-0000x-of-00014.gguf", "-00001-of-00002.gguf", ""}) {
    CAPTURE(other);
    CHECK(!parse_split_name(other));
  }
}

TEST_CASE("any part of a set opens the whole set") {
  std::string fingerprint;
  for (int part = 1; part <= 3; ++part) {
    const ModelFile m = ModelFile::open(kModels + part_name(part));
    CHECK(m.parts().size() == 3);
    CHECK(m.tensors().size() == 107);
    CHECK(m.parts()[0].n_tensors == 24);
    CHECK(m.metadata().get<std::string>("general.architecture") == "kimi-k3");
    const TensorInfo* t = m.find("blk.1.attn_norm.weight");
    REQUIRE(t != nullptr);
    CHECK(t->part == 1);
    CHECK(m.where(*t) == "k3-split3-f32-00002-of-00003.gguf: blk.1.attn_norm.weight");
    if (part == 1) fingerprint = m.fingerprint();
    CHECK(m.fingerprint() == fingerprint);
  }
  const ModelFile meta_first = ModelFile::open(kModels + "k3-split3-meta-q8-00003-of-00003.gguf");
  CHECK(meta_first.parts()[0].n_tensors == 0);
  CHECK(meta_first.metadata().find("general.architecture") != nullptr);
}

TEST_CASE("data() points at the tensor's own bytes in its own part") {
  const TempDir dir;
  write_set(dir, make_set(3));
  const ModelFile m = ModelFile::open(split_path(dir / "m", 2, 3));
  for (int i = 0; i < 3; ++i) {
    const TensorInfo* t = m.find("t" + std::to_string(i));
    REQUIRE(t != nullptr);
    CHECK(m.data(*t)[0] == static_cast<std::byte>(i + 1));
    CHECK(m.data(*t)[31] == static_cast<std::byte>(i + 1));
  }
  CHECK(m.tensor_bytes() == 96);
}

TEST_CASE("part_missing names the part, the count and the file") {
  const TempDir dir;
  copy_set(dir);
  std::filesystem::remove(dir / part_name(3));
  CHECK(open_refusal(dir / part_name(1)) == "part 3 of 3 missing: " + (dir / part_name(3)));
  std::filesystem::remove(dir / part_name(2));
  CHECK(open_refusal(dir / part_name(1)) ==
        "part 2 of 3 missing: " + (dir / part_name(2)) + " (and 1 more: part 3)");
}

TEST_CASE("part_duplicated: a copy of another part under this part's name") {
  const TempDir dir;
  copy_set(dir);
  std::filesystem::copy_file(dir / part_name(2), dir / part_name(3),
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(has(open_refusal(dir / part_name(1)),
            part_name(3) + ": is part 2 by its split.no, part 3 by its name"));
}

TEST_CASE("part_truncated names the part, the tensor and both sizes") {
  const TempDir dir;
  copy_set(dir);
  std::filesystem::resize_file(dir / part_name(2), 200000);
  const std::string line = open_refusal(dir / part_name(1));
  CHECK(has(line, part_name(2) + ": "));
  CHECK(has(line, "file has 200000"));
}

TEST_CASE("part_foreign: a part of another model is refused") {
  SUBCASE("by its count") {
    auto set = make_set(3);
    for (auto& [key, value] : set[1].metadata) {
      if (key == "split.count") value = std::uint16_t{9};
    }
    CHECK(has(set_refusal(set), "m-00002-of-00003.gguf: split.count is 9, the name says 3"));
  }
  SUBCASE("by its architecture") {
    auto set = make_set(2);
    set[1].metadata.emplace_back("general.architecture", "llama");
    CHECK(has(set_refusal(set),
              "m-00002-of-00002.gguf: general.architecture: is string \"llama\", "
              "m-00001-of-00002.gguf has string \"kimi-k3\""));
  }
  SUBCASE("by its total of tensors") {
    auto set = make_set(2);
    for (auto& [key, value] : set[1].metadata) {
      if (key == "split.tensors.count") value = std::int32_t{5};
    }
    CHECK(has(set_refusal(set), "split.tensors.count is 5, the first part says 2"));
  }
  SUBCASE("by a tensor that another part has") {
    auto set = make_set(3);
    set[2].tensors[0].name = "t0";
    CHECK(has(set_refusal(set),
              "m-00003-of-00003.gguf: t0: the tensor is also in m-00001-of-00003.gguf"));
  }
  SUBCASE("by keys that are missing") {
    auto set = make_set(2);
    set[1].metadata.clear();
    CHECK(has(set_refusal(set), "named part 2 of 2, but has no key split.count"));
  }
  SUBCASE("a key of its own is only warned about") {
    auto set = make_set(2);
    set[1].metadata.emplace_back("extra", std::uint32_t{1});
    const TempDir dir;
    write_set(dir, set);
    const ModelFile m = ModelFile::open(split_path(dir / "m", 1, 2));
    REQUIRE(m.warnings().size() == 1);
    CHECK(has(m.warnings()[0], "extra: the first part lacks this key"));
  }
}

TEST_CASE("split_count_stale is refused with both numbers unless it is to be ignored") {
  auto set = make_set(3);
  for (Part& part : set) {
    for (auto& [key, value] : part.metadata) {
      if (key == "split.tensors.count") value = std::int32_t{2760};
    }
  }
  const TempDir dir;
  write_set(dir, set);
  const std::string path = split_path(dir / "m", 1, 3);
  const std::string line = open_refusal(path);
  CHECK(has(line, "split.tensors.count is 2760, the 3 parts hold 3 tensors"));
  CHECK(has(line, "--ignore-split-count"));
  const ModelFile m = ModelFile::open(path, {.ignore_split_count = true});
  CHECK(m.tensors().size() == 3);
  REQUIRE(m.warnings().size() == 1);
  CHECK(has(m.warnings()[0], "2760"));
}

TEST_CASE("a part under a name that hides its siblings is refused") {
  const TempDir dir;
  std::filesystem::copy_file(kModels + part_name(1), dir / "renamed.gguf");
  CHECK(has(open_refusal(dir / "renamed.gguf"), "one of 3 parts"));
}

TEST_CASE("what is no regular file is refused in one clear line") {
  const TempDir dir;
  CHECK(open_refusal(dir / "absent.gguf") == dir / "absent.gguf" + ": no such file");
  CHECK(has(open_refusal(dir.path()), ": is a directory, expected a GGUF file"));
  write_bytes(dir / "empty.gguf", {});
  CHECK(has(open_refusal(dir / "empty.gguf"), ": is empty, expected a GGUF file"));
  REQUIRE(mkfifo((dir / "fifo.gguf").c_str(), 0600) == 0);
  CHECK(has(open_refusal(dir / "fifo.gguf"), ": is a FIFO, expected a GGUF file"));
  write_bytes(dir / "shut.gguf", test::GgufBytes::good().bytes);
  REQUIRE(chmod((dir / "shut.gguf").c_str(), 0) == 0);
  if (access((dir / "shut.gguf").c_str(), R_OK) != 0) {  // root may read it all the same
    CHECK_THROWS_AS(ModelFile::open(dir / "shut.gguf"), std::system_error);
  }
}

TEST_CASE("the fingerprint sees a changed header, size, and sampled byte") {
  const TempDir dir;
  const std::string path = dir / "m.gguf";
  std::vector<std::byte> bytes = read_bytes(kModels + "k3-legacy.gguf");
  write_bytes(path, bytes);
  const std::string original = ModelFile::open(path).fingerprint();
  CHECK(original.size() == 32);
  const auto fingerprint_with = [&](std::size_t at) {
    std::vector<std::byte> changed = bytes;
    changed[at] ^= std::byte{1};
    write_bytes(path, changed);
    return ModelFile::open(path).fingerprint();
  };
  const std::size_t data = read_gguf(MemorySource(bytes)).data_begin;
  CHECK(fingerprint_with(data) != original);
  CHECK(fingerprint_with(bytes.size() - 1) != original);
  // A letter of general.name, which is inside the header.
  const auto text = std::string_view(reinterpret_cast<const char*>(bytes.data()), data);
  const std::size_t name = text.find("k3-legacy");
  REQUIRE(name != std::string_view::npos);
  CHECK(fingerprint_with(name) != original);
  bytes.resize(bytes.size() + 1);
  write_bytes(path, bytes);
  CHECK(ModelFile::open(path).fingerprint() != original);
}

TEST_CASE("populating a narrow band leaves the rest of the mapping untouched") {
  const TempDir dir;
  constexpr std::uint64_t kBytes = 32 << 20;
  constexpr std::uint64_t kBand = 1 << 20;
  const std::vector<std::byte> piece(1 << 20, std::byte{42});
  write_gguf(dir / "m.gguf", {}, {{"t", BlockType::kF32, {kBytes / 4}}}, {},
             [&](std::size_t, const TensorDecl&, const Put& put) {
               for (std::uint64_t i = 0; i < kBytes; i += piece.size()) put(piece);
             });
  const ModelFile m = ModelFile::open(dir / "m.gguf");
  const TensorInfo& t = *m.find("t");
  const std::byte* data = m.data(t);
  CHECK(resident_bytes(data) == 0);  // reading the header maps nothing

  // Fault-around may add its window (64 KiB, or a large folio of the page cache) at either end.
  constexpr std::uint64_t kSlack = 2 << 20;
  m.will_need(t, 8 << 20, (8 << 20) + kBand);
  CHECK(resident_bytes(data) == 0);  // it reads ahead into the page cache, no more
  m.populate(t, (8 << 20) + 100, (8 << 20) + 100 + kBand);
  const std::uint64_t populated = resident_bytes(data);
  CHECK(populated >= kBand);
  CHECK(populated <= kBand + kSlack);
  CHECK(data[(8 << 20) + 100] == std::byte{42});

  m.release(t, 0, t.bytes);
  CHECK(resident_bytes(data) <= 8192);  // the first and last page may be shared with other bytes

  m.populate(t, 0, t.bytes);
  CHECK(resident_bytes(data) >= kBytes);  // so the small numbers above meant something
  m.populate(t, 5, 5);
  CHECK(has(refusal_of([&] { m.populate(t, 0, t.bytes + 1); }), "m.gguf: t: bytes 0 to"));
  CHECK(has(refusal_of([&] { m.will_need(t, 2, 1); }), "m.gguf: t: bytes 2 to 1"));
}

}  // namespace k3
