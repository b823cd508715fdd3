// An answer does not depend on what else is in its batch: bit for bit, log-probabilities included.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>

#include "apps/batch_run.h"
#include "comm/thread_comm.h"
#include "loader/parts.h"
#include "rank/synth.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

constexpr int kRequests = 200;

// A model of random weights with a vocabulary, and 200 requests to it, in a folder of their own.
class Site {
 public:
  Site() : folder_(fs::temp_directory_path() / ("k3batch_run." + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
    SynthOptions o;
    const SynthModel m = parse_synth_model("tiny");
    o.shape = m.shape;
    o.recipe = m.recipe;
    write_synthetic(model(), o);
    std::ofstream in(input());
    for (int i = 0; i < kRequests; ++i) in << request(i) << "\n";
  }
  ~Site() { fs::remove_all(folder_); }
  std::string model() const { return (folder_ / "m.gguf").string(); }
  std::string input() const { return (folder_ / "in.jsonl").string(); }
  std::string output() const { return (folder_ / "out.jsonl").string(); }

 private:
  // Prompts of 1 to some 150 tokens (a letter each); every eighth begins like others; every kind of sampling.
  static std::string request(int i) {
    std::string prompt;
    if (i % 8 == 0)
      for (int k = 0; k < 28 + 10 * (i % 3); ++k) prompt += "ab" + std::to_string(k % 7);
    for (int k = 0; k < 1 + i * 7 % 20; ++k) prompt += static_cast<char>('a' + (i * 3 + k) % 26);
    std::string line = R"({"prompt": ")" + prompt +
                       R"(", "ignore_eos": true, "logprobs": true, "max_tokens": )" +
                       std::to_string(1 + i % 4) + R"(, "seed": )" + std::to_string(i % 5);
    if (i % 3 == 0) line += R"(, "temperature": 0)";
    if (i % 5 == 0) line += R"(, "top_k": 7, "repetition_penalty": 1.3)";
    if (i % 7 == 0) line += R"(, "presence_penalty": 0.5, "top_p": 1)";
    return line + "}";
  }

  fs::path folder_;
};

struct Layout {
  int tp = 1, pp = 1;
};
struct Batch {
  int n_slot = 1;
  std::int64_t n_prefix = 0;
  std::int64_t chunk_tok = 128;
  bool reproducible = true;
};
struct Outcome {
  std::multiset<std::string> lines;  // but for their timings
  BatchStats stats;
};

Outcome run_batch(const Site& site, const Layout& layout, const Batch& batch) {
  Outcome out;
  fs::remove(site.output());
  run_ranks(layout.tp * layout.pp, [&](Comm& world) {
    RunConfig c;
    c.model = site.model();
    c.layout.tp = layout.tp;
    c.layout.pp = layout.pp;
    c.n_ctx = 400;
    c.n_slot = batch.n_slot;
    c.chunk_tok = batch.chunk_tok;
    c.reproducible = batch.reproducible;
    const auto backend = make_cpu_backend(1);
    Engine engine(c, world, *backend);
    if (world.rank() != 0) {
      engine.serve();
      return;
    }
    const Tokenizer tokenizer(read_vocab(engine.file().metadata(), c.model));
    LineReader reader(site.input());
    BatchOutput writer(site.output(), false);
    BatchDefaults defaults;
    defaults.n_ctx = c.n_ctx;
    BatchOptions options;
    options.n_prefix = batch.n_prefix;
    BatchRun run(engine, tokenizer, reader, writer, defaults, options);
    run.run([] { return false; }, [] {});
    out.stats = run.stats();
    engine.stop();
  });
  std::ifstream lines(site.output());
  const std::regex timings(R"(, "timings": \{[^}]*\})");
  for (std::string line; std::getline(lines, line);)
    out.lines.insert(std::regex_replace(line, timings, ""));
  return out;
}

void check_same(const Outcome& alone, const Outcome& batch) {
  REQUIRE(batch.stats.n_answered == kRequests);
  REQUIRE(batch.stats.n_failed == 0);
  CHECK(batch.stats.n_step < alone.stats.n_step);
  int n_other = 0;
  for (auto a = alone.lines.begin(), b = batch.lines.begin(); a != alone.lines.end(); ++a, ++b)
    n_other += *a != *b ? 1 : 0;
  CHECK(n_other == 0);
}

TEST_CASE("answers in a batch are bit for bit those that each request gets alone") {
  const Site site;
  for (const Layout& layout : {Layout{1, 1}, Layout{2, 1}, Layout{1, 3}}) {
    CAPTURE(layout.tp);
    CAPTURE(layout.pp);
    const Outcome alone = run_batch(site, layout, {});
    REQUIRE(alone.lines.size() == kRequests);
    REQUIRE(alone.stats.n_reused_tok == 0);
    check_same(alone, run_batch(site, layout, {.n_slot = 3, .n_prefix = 2}));
    const Outcome many = run_batch(site, layout, {.n_slot = 24, .n_prefix = 8, .chunk_tok = 300});
    check_same(alone, many);
    CHECK(many.stats.n_reused_tok > 500);
  }
}

// What holds on CPU ranks without the promise, too: their loops take each token by itself.
TEST_CASE("on CPU ranks nor does it matter where prompts are cut") {
  const Site site;
  const Outcome alone = run_batch(site, {}, {.reproducible = false});
  check_same(
      alone,
      run_batch(site, {}, {.n_slot = 5, .n_prefix = 8, .chunk_tok = 37, .reproducible = false}));
  CHECK(run_batch(site, {2, 1}, {.reproducible = false}).lines != alone.lines);
}

}  // namespace
}  // namespace k3
