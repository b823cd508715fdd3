#include "loader/gguf_writer.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include "loader/atomic_file.h"
#include "loader/parts.h"
#include "tests/loader/gguf_bytes.h"

namespace k3 {

using test::has;
using test::read_bytes;
using test::refusal_of;
using test::TempDir;

namespace {

MetadataEntries all_values() {
  return {{"general.architecture", "kimi-k3"},
          {"u8", std::uint8_t{1}},
          {"i16", std::int16_t{-2}},
          {"f32", 0.5f},
          {"f64", -1e-300},
          {"bool", true},
          {"u64", ~std::uint64_t{0}},
          {"words", std::vector<std::string>{"a", "", "\xc4\xa0the"}},
          {"ints", std::vector<std::int32_t>{0, 0, 0, 1}},
          {"flags", BoolArray{{1, 0}}},
          {"nested", NestedArray{{std::vector<std::uint8_t>{1, 2}, std::vector<float>{}}}}};
}

// Byte i of a tensor is a function of its index and i.
void fill_pattern(std::size_t index, const TensorDecl& decl, const Put& put) {
  std::vector<std::byte> bytes(decl.bytes());
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(index * 31 + i);
  const std::size_t half = bytes.size() / 2;  // in two pieces
  put(std::span(bytes).first(half));
  put(std::span(bytes).subspan(half));
}

const std::vector<TensorDecl> kTensors = {{"a", BlockType::kF32, {5}},
                                          {"b", BlockType::kIQ1_S, {256, 3}},
                                          {"c", BlockType::kMXFP4, {32, 2, 3}},
                                          {"d", BlockType::kQ8_0, {64, 1, 2, 2}}};

void check_tensors(const ModelFile& m) {
  REQUIRE(m.tensors().size() == kTensors.size());
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    const TensorInfo* t = m.find(kTensors[i].name);
    REQUIRE(t != nullptr);
    CHECK(t->type == kTensors[i].type);
    CHECK(t->n_dims == static_cast<int>(kTensors[i].dims.size()));
    REQUIRE(t->bytes == kTensors[i].bytes());
    for (std::size_t k = 0; k < t->bytes; ++k) {
      REQUIRE(m.data(*t)[k] == static_cast<std::byte>(i * 31 + k));
    }
  }
}

// Writes may not pass `bytes` while this lives: stands in for a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &old_);
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int) = nullptr;
};

}  // namespace

TEST_CASE("a written file reads back: every value, every tensor, every byte") {
  for (const std::uint64_t alignment : {32u, 8u, 4096u}) {
    CAPTURE(alignment);
    const TempDir dir;
    const auto paths =
        write_gguf(dir / "m.gguf", all_values(), kTensors, {.alignment = alignment}, fill_pattern);
    CHECK(paths == std::vector<std::string>{dir / "m.gguf"});
    const ModelFile m = ModelFile::open(paths[0]);
    check_tensors(m);
    for (const auto& [key, value] : all_values()) {
      const auto& name = key;  // clang 14 cannot capture a structured binding
      CAPTURE(name);
      REQUIRE(m.metadata().find(key) != nullptr);
      CHECK(*m.metadata().find(key) == value);
    }
    CHECK(m.metadata().get<int>("general.alignment").value_or(32) == static_cast<int>(alignment));
  }
}

TEST_CASE("a model is split by tensors, by bytes, and with a part for the metadata") {
  const auto written = [](GgufWriteOptions options, std::size_t parts) {
    const TempDir dir;
    const auto paths = write_gguf(dir / "m.gguf", all_values(), kTensors, options, fill_pattern);
    REQUIRE(paths.size() == parts);
    CHECK(paths[0] == split_path(dir / "m", 1, static_cast<int>(parts)));
    const ModelFile m = ModelFile::open(paths.back());
    CHECK(m.warnings().empty());
    check_tensors(m);
    CHECK(m.metadata().get<int>("split.tensors.count") == 4);
    return m.parts()[0].n_tensors;
  };
  CHECK(written({.max_part_tensors = 3}, 2) == 3);
  CHECK(written({.max_part_tensors = 1}, 4) == 1);
  CHECK(written({.max_part_bytes = 200}, 3) == 2);
  CHECK(written({.max_part_bytes = 1}, 4) == 1);  // a tensor larger than a part has its own
  CHECK(written({.max_part_tensors = 2, .metadata_part = true}, 3) == 0);
  CHECK(written({.alignment = 256, .max_part_tensors = 2}, 2) == 2);
}

TEST_CASE("a header alone reads back for planning and is refused for running") {
  const TempDir dir;
  // 553 GiB of experts that need not be anywhere.
  const std::vector<TensorDecl> tensors = {
      {"blk.1.ffn_up_exps.weight", BlockType::kIQ1_S, {3584, 3072, 896 * 300}},
      {"output_norm.weight", BlockType::kF32, {7168}}};
  const Fill never = [](std::size_t, const TensorDecl&, const Put&) {
    FAIL("no data is asked for");
  };
  write_gguf(dir / "m.gguf", {}, tensors, {.header_only = true}, never);
  CHECK(std::filesystem::file_size(dir / "m.gguf") < 1000);
  const ModelFile m = ModelFile::open(dir / "m.gguf", {.header_only = true});
  CHECK(m.tensors()[0].bytes == tensors[0].bytes());
  CHECK(m.tensor_bytes() > std::uint64_t{500} << 30);
  CHECK(m.fingerprint().size() == 32);
  CHECK(has(refusal_of([&] { m.data(m.tensors()[0]); }), "a header without data?"));
  CHECK(has(refusal_of([&] { ModelFile::open(dir / "m.gguf"); }), "ends at byte"));
}

TEST_CASE("a fill of the wrong size and an impossible shape are refused and leave nothing") {
  const TempDir dir;
  const auto write = [&](std::vector<TensorDecl> tensors, std::size_t bytes) {
    return refusal_of([&] {
      write_gguf(dir / "m.gguf", {}, tensors, {},
                 [&](std::size_t, const TensorDecl&, const Put& put) {
                   put(std::vector<std::byte>(bytes));
                 });
    });
  };
  const TensorDecl good{"t", BlockType::kF32, {8}};
  CHECK(has(write({good}, 31), "t: filled with 31 bytes, expected 32"));
  CHECK(has(write({good}, 33), "t: filled with 33 bytes, expected 32"));
  CHECK(has(write({{"t", BlockType::kF32, {}}}, 0), "0 dimensions"));
  CHECK(has(write({{"t", BlockType::kF32, {8, 0}}}, 0), "dimension 0"));
  CHECK(has(write({{"t", BlockType::kQ8_0, {33}}}, 0), "not whole blocks of 32"));
  CHECK(has(write({{"t", BlockType::kF32, {1ll << 40, 1ll << 40}}}, 0), "overflows"));
  for (const std::uint64_t alignment : {0u, 3u, 1u << 21}) {
    CHECK(has(refusal_of([&] {
                write_gguf(dir / "m.gguf", {}, {}, {.alignment = alignment}, fill_pattern);
              }),
              "expected a power of two"));
  }
  CHECK(has(refusal_of([&] {
              write_gguf(dir / "m.gguf", {{"general.alignment", 64u}}, {}, {}, fill_pattern);
            }),
            "is not to be stated"));
  CHECK(std::filesystem::is_empty(dir.path()));
}

TEST_CASE("a disk that fills up is an error of the environment and leaves nothing") {
  const TempDir dir;
  const FileSizeLimit limit(1 << 20);
  const std::vector<TensorDecl> tensors = {{"a", BlockType::kF32, {1000}},
                                           {"b", BlockType::kF32, {1 << 20}}};
  CHECK_THROWS_AS(write_gguf(dir / "m.gguf", {}, tensors, {.max_part_tensors = 1},
                             [](std::size_t, const TensorDecl& t, const Put& put) {
                               put(std::vector<std::byte>(t.bytes()));
                             }),
                  std::system_error);
  CHECK(std::filesystem::is_empty(dir.path()));
}

TEST_CASE("an atomic file replaces the old one only when committed") {
  const TempDir dir;
  const std::string path = dir / "f";
  const std::vector<std::byte> old{std::byte{1}};
  test::write_bytes(path, old);
  {
    AtomicFile file(path);
    file.write(std::vector<std::byte>(3 << 20, std::byte{2}));
    file.sync();
  }
  CHECK(read_bytes(path) == old);
  {
    AtomicFile file(path);
    file.write(old);
    file.write(std::vector<std::byte>(3 << 20, std::byte{2}));
    file.write(old);
    file.commit();
  }
  CHECK(read_bytes(path).size() == (3 << 20) + 2);
  CHECK(!std::filesystem::exists(path + "." + std::to_string(::getpid()) + ".tmp"));
  CHECK_THROWS_AS(AtomicFile(dir / "no/such/folder/f"), std::system_error);
}

TEST_CASE("an atomic file replaces no device, FIFO or folder, and not the link to a file") {
  const TempDir dir;
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK_THROWS_AS(AtomicFile(dir / "fifo"), std::invalid_argument);
  CHECK_THROWS_AS(AtomicFile{dir.path()}, std::invalid_argument);
  CHECK(std::filesystem::is_fifo(dir / "fifo"));
  CHECK(std::distance(std::filesystem::directory_iterator(dir.path()), {}) == 1);

  const std::vector<std::byte> old{std::byte{1}}, now{std::byte{2}};
  test::write_bytes(dir / "file", old);
  std::filesystem::create_symlink("file", dir / "link");
  AtomicFile file(dir / "link");
  file.write(now);
  file.commit();
  CHECK(std::filesystem::is_symlink(dir / "link"));
  CHECK(read_bytes(dir / "file") == now);
}

TEST_CASE("two jobs that write the same file at once both finish; the last one's is there, whole") {
  const TempDir dir;
  const std::string path = dir / "f";
  AtomicFile mine(path);
  mine.write(std::vector<std::byte>(3 << 20, std::byte{1}));
  const pid_t other = ::fork();
  REQUIRE(other >= 0);
  if (other == 0) {
    try {
      AtomicFile theirs(path);
      theirs.write(std::vector<std::byte>(5, std::byte{2}));
      theirs.commit();
      ::_exit(0);
    } catch (...) {
      ::_exit(1);
    }
  }
  int status = 0;
  REQUIRE(::waitpid(other, &status, 0) == other);
  CHECK(status == 0);
  CHECK(read_bytes(path).size() == 5);
  mine.commit();
  CHECK(read_bytes(path) == std::vector<std::byte>(3 << 20, std::byte{1}));
}

}  // namespace k3
