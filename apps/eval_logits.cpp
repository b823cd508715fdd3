// k3eval logits: of every position of a sequence, as raw floats.
#include <optional>
#include <stdexcept>

#include "apps/eval_command.h"
#include "apps/eval_input.h"
#include "loader/atomic_file.h"
#include "rank/fault.h"

namespace k3 {
namespace {

constexpr const char* kLogitsAbout =
    R"(Runs token ids through a model and writes the logits of every position: little-endian 32-bit floats,
one row of the vocabulary's size after another. The file appears under its name, replacing what was
there, when it is whole; after an interruption it holds the rows of whole steps.
)";

constexpr const char* kLogitsExamples = R"(  k3eval logits --ids '1 2 3' --out x.f32
  mpirun -n 4 k3eval logits --model model.gguf --ids-file ids.txt --out x.f32 --chunk 64
)";

class EvalLogits : public EvalCommand {
 public:
  bool prepare(const std::vector<std::string>& args) override {
    std::string out;
    Options o({"k3eval logits",
               "k3eval logits [--model FILE] (--ids-file FILE | --ids IDS) --out FILE [options]",
               kLogitsAbout, kLogitsExamples});
    add_input_options(o, in_);
    o.group("Output");
    o.text("--out", "FILE", out, "Where the logits go.");
    add_machine_options(o, in_.config, kAllIds);
    if (!parse_or_page(o, args)) return false;
    if (out.empty()) throw std::invalid_argument("--out: not given");
    read_ids(in_, o, out, "");
    check(in_.config);
    // Before the model is loaded: a path that cannot be written is told at once.
    file_.emplace(out);
    return true;
  }
  const RunConfig& config() const override { return in_.config; }
  std::vector<std::int32_t> prompt() const override { return in_.ids; }

  void run(Engine& engine, JobNotes& notes) override {
    try {
      run_ids(in_.ids, engine, notes, [&](std::span<const float> rows, std::int64_t) {
        file_->write(std::as_bytes(rows));
      });
    } catch (const Interrupted&) {
      file_->commit();
      throw;
    }
    file_->commit();
  }

 private:
  EvalInput in_;
  std::optional<AtomicFile> file_;
};

}  // namespace

std::unique_ptr<EvalCommand> make_eval_logits() { return std::make_unique<EvalLogits>(); }

}  // namespace k3
