// A stored sequence goes on as if it had never left, on the ranks that wrote it and on others; and nothing else is taken for one.
#include "rank/session.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/thread_comm.h"
#include "rank/engine.h"
#include "rank/session_file.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::int32_t>;

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "k3session.XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string path(const std::string& name) const { return (path_ / name).string(); }
  std::size_t n_file() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

struct Setup {
  int tp = 1, pp = 1;
  ShardPolicy policy = ShardPolicy::kFull;
  std::uint64_t seed = 1;  // of the model
  std::int64_t n_ctx = 200;
  CacheType cache = CacheType::kF32;
};

void with_engine(const Setup& s, const std::function<void(Engine&)>& body) {
  run_ranks(s.tp * s.pp, [&](Comm& world) {
    RunConfig c;
    c.synthetic = "tiny,heads=6";
    c.synthetic_seed = s.seed;
    c.layout.tp = s.tp;
    c.layout.pp = s.pp;
    c.layout.policy = s.policy;
    c.n_ctx = s.n_ctx;
    c.n_slot = 3;
    c.cache = s.cache;
    const auto backend = make_cpu_backend(1);
    Engine engine(c, world, *backend);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    body(engine);
    engine.stop();
  });
}

SamplerOptions sampling() {
  SamplerOptions o;
  o.temp = 0;
  o.repetition_penalty = 1.2f;  // so that the ids seen count,
  o.presence_penalty = 0.3f;    // and those drawn
  return o;
}

// What the sequence was before it was stored: 90 ids given, 5 drawn. Returns all of them.
Ids begin(Engine& e, int slot) {
  Ids ids;
  for (int i = 0; i < 90; ++i) ids.push_back(3 + i * 7 % 150);
  e.reset(slot);
  Decision d = e.extend(slot, ids, sampling(), 0, false);
  for (std::uint64_t draw = 1; draw <= 5; ++draw) {
    ids.push_back(d.id);
    d = e.extend(slot, std::span(ids).last(1), sampling(), draw, true);
  }
  return ids;
}

// How it goes on.
std::vector<Decision> go_on(Engine& e, int slot) {
  const Ids question = {5, 9, 5, 77};
  std::vector<Decision> out = {e.extend(slot, question, sampling(), 6, false)};
  for (std::uint64_t draw = 7; draw < 12; ++draw)
    out.push_back(e.extend(slot, {&out.back().id, 1}, sampling(), draw, true));
  return out;
}

Ids store(const Setup& s, const std::string& path, std::vector<Decision>* later = nullptr) {
  Ids ids;
  with_engine(s, [&](Engine& e) {
    ids = begin(e, 1);
    e.store(1, path, ids);
    if (later) *later = go_on(e, 1);
  });
  return ids;
}

TEST_CASE("a stored sequence goes on as if it had never left, on other layouts within rounding") {
  const Folder folder;
  const std::vector<Setup> setups = {
      {}, {.tp = 2}, {.tp = 3}, {.tp = 2, .pp = 2}, {.tp = 2, .policy = ShardPolicy::kExpertsOnly}};
  for (std::size_t from = 0; from < setups.size(); ++from) {
    const std::string path = folder.path("s" + std::to_string(from));
    std::vector<Decision> expected;
    const Ids ids = store(setups[from], path, &expected);
    for (std::size_t to = 0; to < setups.size(); ++to) {
      CAPTURE(from);
      CAPTURE(to);
      with_engine(setups[to], [&](Engine& e) {
        begin(e, 0);  // another slot, that holds something else
        e.extend(0, ids, sampling(), 0, false);
        CHECK(e.load(0, path) == ids);
        CHECK(e.length(0) == std::ssize(ids));
        const std::vector<Decision> got = go_on(e, 0);
        for (std::size_t i = 0; i < got.size(); ++i) {
          CHECK(got[i].id == expected[i].id);
          if (from == to) {
            CHECK(got[i].logit == expected[i].logit);
          } else {
            CHECK(std::abs(got[i].logit - expected[i].logit) < 1e-3f);
          }
        }
      });
    }
  }
}

// Every head's and row's bytes, whichever ranks wrote them.
std::vector<std::byte> contents(const std::string& path, const Setup& s) {
  const SessionHead head = read_session_head(path);
  SessionParts parts(path, head);
  std::vector<std::byte> out;
  with_engine(s, [&](Engine& e) {
    const ModelConfig& m = e.model();
    for (int layer = 0; layer < m.n_layer; ++layer) {
      const bool mla = m.layers[static_cast<std::size_t>(layer)].is_mla;
      for (std::int64_t h = 0; h < (mla ? 1 : m.n_head); ++h) {
        const std::size_t row = static_cast<std::size_t>(m.cache_row()) * sizeof(float);
        std::vector<std::byte> bytes(
            mla ? row * head.ids.size()
                : static_cast<std::size_t>(m.kda_head_dim *
                                           (m.kda_head_dim + 3 * (m.conv_kernel - 1))) *
                      sizeof(float));
        if (mla) {
          parts.read_rows(layer, {}, std::ssize(head.ids), row, bytes);
        } else {
          parts.read_head(layer, h, bytes);
        }
        out.insert(out.end(), bytes.begin(), bytes.end());
      }
    }
  });
  return out;
}

TEST_CASE("through other layouts and back not a bit is lost") {
  const Folder folder;
  const std::string first = folder.path("first"), other = folder.path("other");
  const Ids ids = store({}, first);
  const auto expected = contents(first, {});
  std::string from = first;
  for (const Setup& s : {Setup{.tp = 3}, Setup{.pp = 2}, Setup{.tp = 2}, Setup{}}) {
    const std::string to = folder.path("s" + std::to_string(s.tp) + std::to_string(s.pp));
    with_engine(s, [&](Engine& e) { e.store(2, to, e.load(2, from)); });
    CHECK(contents(to, {}) == expected);
    CHECK(read_session_head(to).ids == ids);
    CHECK(read_session_head(to).generated == read_session_head(first).generated);
    from = to;
  }
}

TEST_CASE("rows that were dealt out over ranks come together, and are dealt anew") {
  const Folder folder;
  constexpr std::int64_t kLength = 200;
  SessionHead head;
  head.tag = "a";
  const auto value = [](std::int64_t pos) { return static_cast<std::byte>(pos * 5 % 251); };
  for (std::int64_t part = 0; part < 3; ++part) {
    const RowShard deal{.part = part, .n_part = 3, .block = 16};
    std::vector<std::byte> rows;
    for (std::int64_t pos = 0; pos < kLength; ++pos)
      if (deal.keeps(pos)) rows.push_back(value(pos));
    SessionPartWriter w(session_part_path(folder.path("s"), "a", static_cast<std::size_t>(part)));
    w.add_rows(4, deal, rows);
    head.parts.push_back(w.commit());
  }
  SessionParts parts(folder.path("s"), head);
  for (const RowShard& deal : {RowShard{}, RowShard{.part = 1, .n_part = 2, .block = 64}}) {
    std::vector<std::byte> rows(static_cast<std::size_t>(deal.rows(kLength)));
    parts.read_rows(4, deal, kLength, 1, rows);
    std::size_t row = 0;
    for (std::int64_t pos = 0; pos < kLength; ++pos)
      if (deal.keeps(pos)) CHECK(rows[row++] == value(pos));
  }
}

// What load() of `path` says.
std::string refusal(const Setup& s, const std::string& path) {
  try {
    with_engine(s, [&](Engine& e) { e.load(0, path); });
  } catch (const AgreedFault& e) {
    return e.fault().line;
  }
  return "nothing";
}

void change(const std::string& path, const std::function<void(std::string&)>& how) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  std::string bytes = text.str();
  how(bytes);
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST_CASE("another model's, another cache's, too long, broken: refused on all ranks in one line") {
  const Folder folder;
  const std::string path = folder.path("s");
  const Setup two{.tp = 2};
  store(two, path);
  const SessionHead head = read_session_head(path);
  const std::string part = session_part_path(path, head.tag, 1);
  const auto has = [](const std::string& line, const std::string& what) {
    CAPTURE(line);
    CHECK(line.find(what) != std::string::npos);
  };
  has(refusal({.tp = 2, .seed = 2}, path), "of a model with fingerprint " + head.fingerprint);
  has(refusal({.tp = 2, .cache = CacheType::kF16}, path), "its cache is f32, this run's is f16");
  has(refusal({.tp = 2, .n_ctx = 50}, path), "--ctx 50: " + path + " holds 95 positions");
  has(refusal(two, folder.path("none")), "none: no such file");
  std::ofstream(folder.path("other")) << "{\"prompt\": \"a\"}\n";
  has(refusal(two, folder.path("other")), "is not a session file: has no member k3_session");

  const auto flipped = [](std::size_t at) {
    return [at](std::string& bytes) { bytes[at] = static_cast<char>(bytes[at] ^ 1); };
  };
  change(part, flipped(5000));
  has(refusal(two, path), "are not those that were written");
  // Whoever does not need those bytes' part does not read them: one rank needs both.
  has(refusal({}, path), "are not those that were written");
  change(part, flipped(5000));
  CHECK(refusal(two, path) == "nothing");
  change(part, [](std::string& bytes) { bytes[bytes.size() - 40] ^= 1; });
  has(refusal(two, path), "its index is not the one that was written");
  change(part, [](std::string& bytes) { bytes.pop_back(); });
  has(refusal(two, path), part + ": holds ");
  fs::remove(part);
  has(refusal(two, path), part + ": no such file");
}

TEST_CASE("a session replaces a session and nothing else, and leaves no parts behind") {
  const Folder folder;
  const std::string path = folder.path("s");
  store({.tp = 2}, path);
  CHECK(folder.n_file() == 3);
  store({}, path);
  CHECK(folder.n_file() == 2);
  CHECK(refusal({.tp = 3}, path) == "nothing");
  std::ofstream(folder.path("mine")) << "notes\n";
  CHECK_THROWS_WITH_AS(store({.tp = 2}, folder.path("mine")),
                       doctest::Contains("is not a session file"), AgreedFault);
  CHECK_THROWS_AS(store({.tp = 2}, folder.path("none/s")), AgreedFault);
  CHECK(folder.n_file() == 3);
}

}  // namespace
}  // namespace k3
