#include "apps/manifest.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>

#include "apps/sealing.h"
#include "tests/loader/gguf_bytes.h"

namespace {

using namespace k3;
using test::TempDir;
namespace fs = std::filesystem;

constexpr std::uint64_t kChunk = 1000;

std::string pattern(std::size_t n, unsigned seed) {
  std::string out(n, '\0');
  for (char& c : out) c = static_cast<char>((seed = seed * 1664525u + 1013904223u) >> 24);
  return out;
}

std::string text_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

struct Files {
  TempDir dir;
  std::vector<std::string> paths{dir / "a.bin", dir / "b.bin", dir / "c.bin"};
  std::string journal = dir / "hashes";
  Files() {
    write(paths[0], pattern(4500, 1));  // 5 chunks, the last one short
    write(paths[1], pattern(2000, 2));  // 2 whole ones
    write(paths[2], "c");
  }
  HashOptions options(int threads = 1) const {
    HashOptions o;
    o.chunk_bytes = kChunk;
    o.threads = threads;
    o.journal = journal;
    return o;
  }
  // Runs until `n` chunks are hashed, and ends as a stopped program does.
  void stop_after(int n) const {
    HashOptions o = options();
    o.progress = [&](const HashProgress&) {
      if (--n == 0) throw std::runtime_error("stopped");
    };
    CHECK_THROWS_AS(hash_parts(paths, o), std::runtime_error);
  }
  // The parts, and how many bytes were taken from the journal and how many chunks were hashed.
  std::vector<HashedPart> again(std::uint64_t& resumed, int& n_chunk) const {
    HashOptions o = options(2);
    resumed = 0, n_chunk = 0;
    o.progress = [&](const HashProgress& p) {
      resumed = p.resumed;
      ++n_chunk;
    };
    return hash_parts(paths, o);
  }
};

bool same(const std::vector<HashedPart>& a, const std::vector<HashedPart>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const HashedPart& x, const HashedPart& y) {
                      return x.file == y.file && x.bytes == y.bytes && x.digest == y.digest &&
                             x.chunks == y.chunks;
                    });
}

TEST_CASE("a chunk's digest is its SHA-256, a part's the SHA-256 of its chunks' digests") {
  CHECK(sha256_hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(digest_of({}) == sha256_hex(""));
  const std::vector<std::string> two{sha256_hex("abc"), sha256_hex("")};
  CHECK(digest_of(two) == "6f1290896ee81a0349174d19f4473d267a10289c40480861d5c42affffbd79f9");
  const Files f;
  const auto parts = hash_parts(f.paths, f.options());
  REQUIRE(parts.size() == 3);
  CHECK(parts[0].file == "a.bin");
  CHECK(parts[0].bytes == 4500);
  REQUIRE(parts[0].chunks.size() == 5);
  CHECK(parts[0].chunks[0] == sha256_hex(text_of(f.paths[0]).substr(0, 1000)));
  CHECK(parts[0].chunks[4] == sha256_hex(text_of(f.paths[0]).substr(4000)));
  CHECK(parts[1].chunks.size() == 2);
  CHECK(parts[1].digest == digest_of(parts[1].chunks));
  CHECK(parts[2].chunks == std::vector<std::string>{sha256_hex("c")});
}

TEST_CASE("any number of threads gives the same digests") {
  const Files f;
  HashOptions one = f.options(1), many = f.options(8);
  one.journal = many.journal = "";
  CHECK(same(hash_parts(f.paths, one), hash_parts(f.paths, many)));
}

TEST_CASE("a stopped run goes on where it was and hashes no chunk twice") {
  const Files f;
  f.stop_after(3);
  std::uint64_t resumed = 0;
  int n_chunk = 0;
  const auto parts = f.again(resumed, n_chunk);
  CHECK(resumed == 3000);
  CHECK(n_chunk == 5);
  fs::remove(f.journal);
  CHECK(same(parts, hash_parts(f.paths, f.options())));
}

TEST_CASE("a line that a kill left torn is dropped, and the lines after it are whole") {
  const Files f;
  f.stop_after(2);
  const std::string before = text_of(f.journal);
  write(f.journal, before + "0 2 " + std::string(20, 'a'));
  f.stop_after(2);  // adds lines behind the torn one
  CHECK(text_of(f.journal).starts_with(before + "0 2 "));
  std::uint64_t resumed = 0;
  int n_chunk = 0;
  const auto parts = f.again(resumed, n_chunk);
  CHECK(resumed == 4000);
  fs::remove(f.journal);
  CHECK(same(parts, hash_parts(f.paths, f.options())));
}

TEST_CASE("the journal of files that were changed since is begun anew") {
  const Files f;
  f.stop_after(4);
  write(f.paths[0], pattern(4500, 9));
  fs::last_write_time(f.paths[0], fs::last_write_time(f.paths[0]) + std::chrono::seconds(1));
  std::uint64_t resumed = 1;
  int n_chunk = 0;
  const auto parts = f.again(resumed, n_chunk);
  CHECK(resumed == 0);
  CHECK(n_chunk == 8);
  CHECK(parts[0].chunks[0] == sha256_hex(text_of(f.paths[0]).substr(0, 1000)));
}

TEST_CASE("two runs do not share a journal, and one that cannot be written is refused") {
  const Files f;
  HashOptions o = f.options();
  std::string second;
  o.progress = [&](const HashProgress&) {
    second = refusal([&] { hash_parts(f.paths, f.options()); });
  };
  hash_parts(f.paths, o);
  CHECK(has(second, "another process is hashing with this journal"));
  o = f.options();
  o.journal = (f.dir / "none") + "/hashes";
  CHECK_THROWS_AS(hash_parts(f.paths, o), std::system_error);
}

Manifest sample() {
  Manifest m;
  m.chunk_bytes = kChunk;
  for (int i = 0; i < 3; ++i) {
    HashedPart p{"m-0000" + std::to_string(i + 1) + "-of-00003.gguf", 3500, "", {}};
    for (int c = 0; c < 4; ++c) p.chunks.push_back(sha256_hex(std::to_string(10 * i + c)));
    p.digest = digest_of(p.chunks);
    m.parts.push_back(p);
    const std::string blk = "blk." + std::to_string(i);
    m.tensors.push_back({blk + ".a", "Q8_0", "[64, 2]", static_cast<std::size_t>(i), 500, 1000});
    m.tensors.push_back({blk + ".b", "F32", "[64]", static_cast<std::size_t>(i), 1500, 2000});
  }
  m.keys = {{"general.name", "string \"m\""}, {"kimi-k3.block_count", "u32 3"}};
  return m;
}

void set_chunk(Manifest& m, std::size_t part, std::size_t chunk) {
  m.parts[part].chunks[chunk] = sha256_hex("another");
  m.parts[part].digest = digest_of(m.parts[part].chunks);
}

// The only difference that there is.
std::string only(const Manifest& now) {
  const auto lines = differences(sample(), now);
  CHECK(lines.size() == 1);
  return lines.empty() ? "" : lines[0];
}

TEST_CASE("a manifest written and read again differs in nothing") {
  const Manifest m = sample();
  const std::string text = manifest_json(m);
  const Manifest back = parse_manifest(text, "m.json");
  CHECK(differences(m, back).empty());
  CHECK(manifest_json(back) == text);
}

TEST_CASE("changed bytes are told by the part, the range and the tensors in it") {
  Manifest now = sample();
  set_chunk(now, 1, 3);
  CHECK(only(now) == "m-00002-of-00003.gguf: other bytes between 3000 and 3500: blk.1.b");
  now = sample();
  set_chunk(now, 2, 0);
  CHECK(only(now) == "m-00003-of-00003.gguf: other bytes between 0 and 1000: the header, blk.2.a");
  set_chunk(now, 2, 1);
  CHECK(only(now) ==
        "m-00003-of-00003.gguf: other bytes between 0 and 2000: the header, blk.2.a, blk.2.b");
  set_chunk(now, 2, 3);
  CHECK(differences(sample(), now).size() == 2);
  // Where nothing was hashed, bytes are not compared.
  for (HashedPart& p : now.parts) p.digest = "", p.chunks.clear();
  CHECK(differences(sample(), now).empty());
}

TEST_CASE("renamed, swapped, longer and absent parts are told by name") {
  Manifest now = sample();
  now.parts[1].file = "x-00002-of-00003.gguf";
  CHECK(only(now) ==
        "part 2 of 3: is called x-00002-of-00003.gguf, the manifest has m-00002-of-00003.gguf");
  now = sample();
  std::swap(now.parts[0].chunks, now.parts[1].chunks);
  std::swap(now.parts[0].digest, now.parts[1].digest);
  const auto lines = differences(sample(), now);
  REQUIRE(lines.size() == 2);
  CHECK(lines[0] ==
        "m-00001-of-00003.gguf: holds the bytes that the manifest has in m-00002-of-00003.gguf");
  now = sample();
  now.parts[0].bytes = 3400;
  CHECK(only(now) == "m-00001-of-00003.gguf: 3400 bytes, the manifest has 3500");
  now = sample();
  now.parts.pop_back();
  CHECK(only(now) == "2 parts, the manifest has 3");
}

TEST_CASE("changed, missing and new keys and tensors are told by name") {
  Manifest now = sample();
  now.keys["kimi-k3.block_count"] = "u32 4";
  CHECK(only(now) == "key kimi-k3.block_count: u32 4, the manifest has u32 3");
  now.keys.erase("kimi-k3.block_count");
  CHECK(only(now) == "key kimi-k3.block_count: missing, the manifest has u32 3");
  now = sample();
  now.keys["general.url"] = "string \"u\"";
  CHECK(only(now) == "key general.url: string \"u\", not in the manifest");
  now = sample();
  now.tensors[2].type = "Q4_K";
  CHECK(only(now) ==
        "tensor blk.1.a: Q4_K [64, 2] in part 2 at 500, the manifest has Q8_0 [64, 2] in part 2 at "
        "500");
  now = sample();
  now.tensors.erase(now.tensors.begin());
  CHECK(only(now) == "tensor blk.0.a: missing, the manifest has Q8_0 [64, 2] in part 1 at 500");
  now = sample();
  now.tensors.push_back({"blk.9.c", "F32", "[1]", 0, 3400, 4});
  CHECK(only(now) == "tensor blk.9.c: F32 [1] in part 1 at 3400, not in the manifest");
}

TEST_CASE("a value's text changes with every element of an array and every byte of a long string") {
  CHECK(value_text(Value(std::uint32_t{4})) == "u32 4");
  CHECK(value_text(Value("kimi-k3")) == "string \"kimi-k3\"");
  const std::vector<std::int32_t> a{1, 2, 3}, b{1, 2, 4};
  CHECK(value_text(Value(a)).starts_with("array of 3 i32, sha256 "));
  CHECK(value_text(Value(a)) != value_text(Value(b)));
  const std::vector<std::string> ab{"ab", "c"}, bc{"a", "bc"};
  CHECK(value_text(Value(ab)) != value_text(Value(bc)));
  std::string longer(5000, 'x');
  const std::string before = value_text(Value(longer));
  CHECK(before.starts_with("string of 5000 bytes, sha256 "));
  longer[4999] = 'y';
  CHECK(value_text(Value(longer)) != before);
}

TEST_CASE("what is no manifest, and one whose digests were edited, is refused by name") {
  CHECK(has(refusal([] { parse_manifest("{", "m.json"); }), "m.json: is no manifest: "));
  CHECK(has(refusal([] { parse_manifest("[]", "m.json"); }), "expected format \"k3 manifest 1\""));
  const std::string good = manifest_json(sample());
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    REQUIRE(at != text.npos);
    return refusal([&] { parse_manifest(text.replace(at, from.size(), to), "m.json"); });
  };
  CHECK(has(edited(sample().parts[1].chunks[2], sha256_hex("other")),
            "m-00002-of-00003.gguf: its digest is not that of its chunks"));
  CHECK(has(edited(sample().parts[1].chunks[2], "short"), "its digest is not that of its chunks"));
  CHECK(has(edited("\"bytes\": 3500", "\"bytes\": 350000"),
            "not as many chunks as its size asks for"));
  CHECK(has(edited("\"keys\"", "\"kyes\""), "m.json: is no manifest: "));
}

TEST_CASE("a missing part is told, and which file has its bytes") {
  const Files f;
  HashOptions o = f.options();
  o.journal = "";
  Manifest was;
  was.chunk_bytes = kChunk;
  was.parts = hash_parts(f.paths, o);
  const std::string folder = f.dir.path();
  CHECK(missing_parts(was, folder, 1).empty());
  fs::rename(f.paths[0], f.dir / "old.bin");
  write(f.dir / "like.bin", pattern(4500, 7));  // as long, but another
  auto lines = missing_parts(was, folder, 2);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0] == "part 1 of 3: a.bin is missing; old.bin has its bytes");
  fs::remove(f.dir / "old.bin");
  lines = missing_parts(was, folder, 2);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0] == "part 1 of 3: a.bin is missing");
}

}  // namespace
