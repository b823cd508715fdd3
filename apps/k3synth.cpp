// Writes synthetic K3 models: any shape, any block types, whole or split, or the header alone.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>
#include <unistd.h>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/options.h"
#include "rank/fault.h"
#include "rank/synth.h"

namespace {

using namespace k3;

const char* const kAbout =
    "Writes a GGUF file of the kimi-k3 architecture with seeded random weights: valid blocks of "
    "every\n"
    "type, scaled so that activations, decays, expert choices and logits look like a real "
    "model's.\n"
    "The text such a model writes is noise. The same seed and options give the same bytes. Weights "
    "are\n"
    "streamed: memory use does not grow with the model.\n"
    "\n"
    "Presets are shapes: tiny (a blink on a CPU), k3-nano, k3-8l and k3-16l (the real widths, "
    "fewer\n"
    "layers), k3-full (the real model, 553 GiB in UD-IQ1_S). Every size can be changed.\n"
    "Quantizations: UD-IQ1_S, UD-Q2_K_XL, UD-Q4_K_XL, UD-Q8_K_XL, a block type for all matrices "
    "(F32,\n"
    "BF16, Q8_0, ...), or experts=TYPE,other=TYPE. A matrix whose rows are no whole number of "
    "blocks\n"
    "becomes Q8_0 or F32.\n";

const char* const kExamples =
    "  k3synth --preset tiny --out tiny.gguf\n"
    "  k3synth --preset tiny --heads 5 --experts 7 --quant F32 --out odd.gguf\n"
    "  k3synth --preset k3-8l --out k3-8l.gguf --split-bytes 20000000000\n"
    "  k3synth --preset k3-full --header-only --out k3-header.gguf\n";

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

struct Request {
  SynthOptions synth;
  std::string preset = "tiny";
  std::string quant = "UD-IQ1_S";
  std::string out;
  std::int64_t n_part = 0;
};

// Sizes are options of their own; -1 keeps the preset's.
struct SizeOption {
  const ShapeSize* of;
  std::int64_t value = -1;
};

std::vector<SizeOption> size_options() {
  std::vector<SizeOption> out;
  for (const ShapeSize& s : shape_sizes()) out.push_back({&s});
  return out;
}

volatile std::sig_atomic_t g_stop_asked = 0;

// A half-written model may be hundreds of gigabytes under a name that nobody looks for: an interruption unwinds, which
// removes it, and so does a full disk.
void unwind_on_signals() {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    // nohup and a shell's background jobs ignore some of them, and mean it.
    if (std::signal(signal, [](int) { g_stop_asked = 1; }) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

// A line now and then; a live one on a terminal.
class Report {
 public:
  void operator()(std::uint64_t done, std::uint64_t total) {
    if (g_stop_asked) throw Interrupted("stopped on request, nothing is left of the file");
    const auto now = Clock::now();
    if (now < next_ && done < total) return;
    next_ = now + (live_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
    const double s = std::chrono::duration<double>(now - start_).count();
    const double gb = static_cast<double>(done) / 1e9;
    if (!live_ && done == total) return;  // the summary follows
    const std::string line = fmt::format("writing {:.2f} of {:.2f} GB, {:.2f} GB/s", gb,
                                         static_cast<double>(total) / 1e9, s > 0 ? gb / s : 0.0);
    if (live_) {
      std::fprintf(stderr, "\r%s\033[K%s", line.c_str(), done == total ? "\n" : "");
    } else {
      print_line(line);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_ = start_ + std::chrono::seconds(1);
  bool live_ = isatty(STDERR_FILENO) == 1;
};

int run(Request& q, const std::vector<SizeOption>& sizes) {
  q.synth.shape = named_shape(q.preset);
  for (const SizeOption& s : sizes) {
    if (s.value != -1) q.synth.shape.*s.of->size = s.value;
  }
  q.synth.recipe = QuantRecipe::parse(q.quant);
  if (q.synth.threads < 1 || q.synth.threads > 1024) {
    throw std::invalid_argument(fmt::format("--threads {}: valid: 1 to 1024", q.synth.threads));
  }
  const ModelOutline outline = outline_of(q.synth.shape, q.synth.recipe);
  const auto n_tensor = static_cast<std::int64_t>(outline.tensors.size());
  if (q.n_part < 0 || q.n_part > n_tensor) {
    throw std::invalid_argument(
        fmt::format("--split {}: valid: 1 to {}, the number of tensors", q.n_part, n_tensor));
  }
  if (q.n_part > 1) q.synth.file.max_part_tensors = (n_tensor + q.n_part - 1) / q.n_part;
  unwind_on_signals();
  const std::vector<std::string> paths =
      write_synthetic(q.out, q.synth, q.synth.file.header_only ? SynthProgress() : Report());
  std::uint64_t bytes = 0;
  for (const TensorDecl& t : outline.tensors) bytes += t.bytes();
  for (const std::string& p : paths) write_out(p + "\n");
  const bool large = bytes >= kGiB;
  const double size = static_cast<double>(bytes) / static_cast<double>(large ? kGiB : kMiB);
  const char* unit = large ? "GiB" : "MiB";
  print_line(fmt::format("{} tensors, {:.2f} {}{}", n_tensor, size, unit,
                         q.synth.file.header_only ? ", header only: no weights written" : ""));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return local_main("k3synth", [&] {
    Request q;
    q.synth.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    std::vector<SizeOption> sizes = size_options();
    Options options({"k3synth",
                     "k3synth --out FILE.gguf [--preset NAME] [--quant RECIPE] [--seed N] ...",
                     kAbout, kExamples});
    options.group("Model");
    options.text("--preset", "NAME", q.preset, "tiny, k3-nano, k3-8l, k3-16l or k3-full.");
    options.text("--quant", "RECIPE", q.quant, "Block types of the tensors.");
    options.number("--seed", "N", q.synth.seed, "Same seed and options: same file.");
    options.group("Output");
    options.text("--out", "FILE", q.out, "Where to write; with parts: NAME-00001-of-0000N.gguf.");
    options.number("--split", "N", q.n_part,
                   "N parts of equally many tensors, or fewer where that does not come out even. "
                   "[default: one file]");
    options.number("--split-bytes", "B", q.synth.file.max_part_bytes,
                   "A new part before one holds more than B bytes. [default: one file]");
    options.flag("--split-metadata", q.synth.file.metadata_part,
                 "The first part holds metadata and no tensors.");
    options.flag("--header-only", q.synth.file.header_only,
                 "Metadata and tensor table only: enough for k3plan.");
    options.number("--threads", "N", q.synth.threads,
                   "Threads that make weights. [default: all cores]");
    options.group("Sizes (each defaults to the preset's)");
    for (SizeOption& s : sizes) {
      options.number(std::string("--") + s.of->name, "N", s.value,
                     std::string(s.of->help) + " [default: the preset's]");
    }
    switch (options.parse(arguments(argc, argv))) {
      case Options::Outcome::kHelp:
        write_out(options.help());
        return 0;
      case Options::Outcome::kVersion:
        write_out(version_text("k3synth") + "\n");
        return 0;
      case Options::Outcome::kRun:
        break;
    }
    if (q.out.empty()) throw std::invalid_argument("--out FILE is missing; k3synth --help");
    if (q.n_part > 0 && q.synth.file.max_part_bytes > 0) {
      throw std::invalid_argument("--split and --split-bytes exclude each other");
    }
    return run(q, sizes);
  });
}
