// The mistakes a reader would fear, made on purpose, each caught: a missing reduce, a doubled reduce, a wrong band, an
// optional tensor skipped, all at three ranks, where they would stay fluent.
#include <doctest/doctest.h>

#include <cmath>
#include <mutex>
#include <string>

#include "comm/thread_comm.h"
#include "rank/prepare.h"
#include "rank/shard.h"
#include "support/golden.h"

namespace k3 {
namespace {

constexpr int kRanks = 3;

enum class Mistake { kNone, kMissingSum, kDoubledSum, kWrongRank };

// Passes everything on but for one mistake at one Point. Its own counters say that all went well, as a bug's would.
class MistakenComm final : public Comm {
 public:
  MistakenComm(Comm& inner, Mistake mistake, Point at)
      : inner_(&inner), mistake_(mistake), at_(at) {}
  MistakenComm(std::unique_ptr<Comm> inner, Mistake mistake, Point at)
      : owned_(std::move(inner)), inner_(owned_.get()), mistake_(mistake), at_(at) {}

  // kWrongRank: rank 1 takes the bands of rank 2, so that one band is counted twice and one not at all.
  int rank() const override {
    return mistake_ == Mistake::kWrongRank && inner_->rank() == 1 && !owned_ ? 2 : inner_->rank();
  }
  int size() const override { return inner_->size(); }

  void sum(Point point, float* data, std::size_t count, StreamHandle stream) override {
    ++stats_[static_cast<std::size_t>(point)].calls;
    if (point == at_ && mistake_ == Mistake::kMissingSum) return;
    inner_->sum(point, data, count, stream);
    if (point == at_ && mistake_ == Mistake::kDoubledSum) inner_->sum(point, data, count, stream);
  }
  void gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                   std::span<const std::size_t> widths, StreamHandle stream) override {
    ++stats_[static_cast<std::size_t>(point)].calls;
    inner_->gather_rows(point, mine, all, n_row, widths, stream);
  }
  void send(Point p, const float* d, std::size_t n, int to, StreamHandle s) override {
    inner_->send(p, d, n, to, s);
  }
  void recv(Point p, float* d, std::size_t n, int from, StreamHandle s) override {
    inner_->recv(p, d, n, from, s);
  }
  void broadcast(Point p, std::span<std::byte> d, int root) override {
    inner_->broadcast(p, d, root);
  }
  std::vector<std::vector<std::byte>> gather_bytes(Point p, std::span<const std::byte> d,
                                                   int root) override {
    return inner_->gather_bytes(p, d, root);
  }
  std::vector<std::vector<std::byte>> all_gather_bytes(Point p,
                                                       std::span<const std::byte> d) override {
    return inner_->all_gather_bytes(p, d);
  }
  void agree(const std::optional<Fault>& fault) override { inner_->agree(fault); }
  void barrier(Point p) override { inner_->barrier(p); }
  std::unique_ptr<Comm> split(int colour, int) override {
    return std::make_unique<MistakenComm>(inner_->split(colour, inner_->rank()), mistake_, at_);
  }

 private:
  std::unique_ptr<Comm> owned_;
  Comm* inner_;
  Mistake mistake_;
  Point at_;
};

// Largest difference from the golden of a model's short sequence.
double run_with(const std::string& name, Mistake mistake, Point at) {
  const golden::Model model = golden::load_model(name);
  const golden::Sequence& s =
      *std::find_if(model.sequences.begin(), model.sequences.end(),
                    [](const golden::Sequence& q) { return q.name == "short"; });
  double worst = 0;
  std::mutex mutex;
  std::vector<float> all(static_cast<std::size_t>(s.n_vocab) * s.ids.size());
  run_ranks(kRanks, [&](Comm& inner) {
    MistakenComm world(inner, mistake, at);
    RunConfig c;
    c.model = model.path;
    c.layout.tp = kRanks;
    c.n_ctx = static_cast<std::int64_t>(s.ids.size());
    const auto backend = make_cpu_backend(1);
    Prepared p = prepare(c, world, *backend);
    ShardOptions options = shard_options(p.config);
    options.logit_rows = c.n_ctx;
    Shard shard(*p.plan, *p.source, *backend, world, options, {}, p.warnings);
    shard.extend(0, s.ids, false);
    const std::vector<float> band = shard.logits({0, c.n_ctx});
    const Band columns = p.plan->vocab_out(world.rank());
    const std::scoped_lock lock(mutex);
    for (std::int64_t t = 0; t < c.n_ctx; ++t) {
      std::copy_n(band.begin() + t * columns.size(), columns.size(),
                  all.begin() + t * s.n_vocab + columns.begin);
    }
  });
  worst = golden::max_abs(all, s.exact);
  return worst / s.exact_max_abs;  // 1: at the tolerance
}

constexpr const char* kModel = "k3-tiny-f32";

}  // namespace

TEST_CASE("without a mistake three ranks stay within the tolerance") {
  CHECK(run_with(kModel, Mistake::kNone, Point::kCount) <= 1.0);
}

TEST_CASE("a missing sum is caught at every Point") {
  for (const Point p : {Point::kEmbed, Point::kAttnOut, Point::kMoeLatent, Point::kFfnOut}) {
    CAPTURE(point_name(p));
    CHECK(run_with(kModel, Mistake::kMissingSum, p) > 10.0);
  }
}

TEST_CASE("a doubled sum is caught at every Point") {
  // Of the embedding the first layer's norms hide a factor, but the bank keeps the raw stream.
  for (const Point p : {Point::kEmbed, Point::kAttnOut, Point::kFfnOut}) {
    CAPTURE(point_name(p));
    CHECK(run_with(kModel, Mistake::kDoubledSum, p) > 10.0);
  }
}

TEST_CASE(
    "a doubled sum over experts hides behind the routed norm, and is caught where there is none") {
  CHECK(run_with("k3-noqlora-f32", Mistake::kDoubledSum, Point::kMoeLatent) > 10.0);
}

TEST_CASE("a rank that takes another's bands is caught") {
  CHECK(run_with(kModel, Mistake::kWrongRank, Point::kCount) > 10.0);
}

namespace {

// A model whose configuration forgets an optional part that is in the file.
std::string plan_without(const std::string& name, void (*forget)(LayerConfig&)) {
  const golden::Model model = golden::load_model(name);
  const ModelFile file = ModelFile::open(model.path);
  std::vector<std::string> dialects;
  ModelConfig config = read_model_config(file.metadata(), file.tensors(), model.path, dialects);
  for (LayerConfig& l : config.layers) forget(l);
  Layout layout;
  layout.tp = kRanks;
  try {
    Plan::make(config, file.tensors(), layout, model.path);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

bool names(const std::string& line, const char* tensor) {
  return line.find(tensor) != std::string::npos;
}

}  // namespace

TEST_CASE("an optional tensor that a configuration skips is named as left over") {
  CHECK(names(plan_without(kModel, [](LayerConfig& l) { l.has_attn_gate = false; }), "attn_gate"));
  CHECK(names(plan_without(kModel, [](LayerConfig& l) { l.has_routed_norm = false; }),
              "ffn_routed_norm"));
  CHECK(names(plan_without(kModel, [](LayerConfig& l) { l.ffn_shared = 0; }), "shexp"));
}

}  // namespace k3
