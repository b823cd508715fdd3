#include "apps/bench_request.h"

#include <cstdio>
#include <stdexcept>

#include <fmt/core.h>

#include "apps/job.h"
#include "apps/options.h"

namespace k3 {
namespace {

constexpr const char* kHelp = R"(usage:
  k3bench decode [options]    time of each token, one at a time, at a depth
  k3bench prefill [options]   tokens per second through a prompt
  k3bench load [options]      time and GB/s of loading, beside a plain parallel read of the files
  k3bench ceilings [options]  what the device reaches at most: copy, read, products, launches
  k3bench collective [options]  latency and GB/s of what the ranks say to each other

k3bench decode --help and its like list the options of each; --version prints the build.
)";

constexpr const char* kOutputAbout = R"(
Standard output gets lines for people and one line 'RESULT_JSON {...}' with every number, the ids, the
model's fingerprint, the commit, the devices and the options; --log keeps the same and more. Times are
those of rank 0, whose step ends when the slowest rank's answer has come. Without --ctx, decode and
prefill keep as many positions as they need. All else goes to standard error.
)";

constexpr const char* kDecodeAbout =
    R"(Measures decoding: --depth positions are put into the sequence, --warmup tokens follow untimed, then
--tokens tokens are drawn greedily, one a step, each timed. End tokens do not end it. Up to a depth of
1024 the positions come from a real prefill of seeded ids; deeper ones are fabricated rows: seeded
values that no token wrote, so that attention reads as much as in earnest and the ids mean nothing.

Printed: median, 10th and 90th percentile and mean of the times; a second clock around all timed tokens,
which must agree with their sum; and for each rank the bytes that a token cannot but move: every weight
once (of the routed experts the share that is used), KDA state read and written, MLA rows up to the
token, with the GB/s that this makes and, with --ceiling-gbs, the floor below which no token can be.
)";

constexpr const char* kDecodeExamples =
    R"(  k3bench decode --depth 128 -n 64
  k3bench decode --synthetic k3-8l --backend cuda --cache f16 --depth 131072 --ceiling-gbs 4410 \
      --predict 2.9 --log results/decode-8l.h5
  mpirun -n 2 k3bench decode --model k3-16l.gguf --backend cuda --depth 4096 --fill prefill
)";

constexpr const char* kPrefillAbout =
    R"(Measures prefill: --tokens seeded ids run through the model in steps of --chunk, --repeat times from an
empty sequence (or from --depth positions, as with decode), after --warmup untimed times. TTFT is the
time from the ids to the first token's id; tok/s is tokens over TTFT. Medians and percentiles are over
the repeats. Every repeat must draw the same first id.

With --reuse the --depth positions are a beginning that prompts share, read once and kept: TTFT of
a prompt that reads all of it, of one that forks it from another slot, and of one that copies it from
host memory; and whether the logits are equal.
)";

constexpr const char* kPrefillExamples =
    R"(  k3bench prefill --tokens 512 --chunk 128
  k3bench prefill --synthetic k3-8l --backend cuda --tokens 4096 --chunk 2048 --repeat 3
  k3bench prefill --depth 1024 --tokens 64 --reuse
)";

constexpr const char* kLoadAbout =
    R"(Measures loading: the model is planned and loaded as by every other program; then it is let go, and the
same ranges of the files are read by plain threads into scratch memory. Says how much of the files the
page cache held before each: loading itself fills it, so without --evict the raw read usually comes
from memory. CPU ranks use the files where they are mapped; their loading is the reading in of pages.
)";

constexpr const char* kLoadExamples =
    R"(  k3bench load --model k3-8l.gguf --backend cuda
  mpirun -n 8 k3bench load --model K3-00001-of-00014.gguf --backend cuda --evict
)";

constexpr const char* kCeilingsAbout =
    R"(Measures what each rank's device reaches at most, for floors to be computed from: a copy within its
memory, a read of it, products, and what a launch costs, one after another and in a graph. No model.
)";

constexpr const char* kCeilingsExamples =
    R"(  k3bench ceilings --backend cuda --log results/ceilings.h5
)";

constexpr const char* kCollectiveAbout =
    R"(Measures what the ranks say to each other, by the communicator that --comm names: sum and gather_rows
of 4 bytes to --most-bytes, and a message back and forth between ranks 0 and 1; one call after another,
and in a graph where the communicator can be in one. Latency is the time of one of many calls in a row;
GB/s counts a rank's payload once. No model.
)";

constexpr const char* kCollectiveExamples =
    R"(  mpirun -n 2 k3bench collective --backend cuda --comm nccl
)";

Options options_of(const char* name, const char* more, const char* about, const char* examples) {
  const std::string program = std::string("k3bench ") + name;
  return Options(
      {program, program + " [--model FILE]" + more + " [options]\nmpirun -n P " + program + " ...",
       std::string(about) + kOutputAbout, examples});
}

void require(const char* option, std::int64_t value, std::int64_t least) {
  if (value < least || value > std::int64_t{1} << 30)
    throw std::invalid_argument(
        fmt::format("{} {}: outside {} to {}", option, value, least, std::int64_t{1} << 30));
}

// Numbers of the command line that may be absent.
struct Asked {
  double expected = 0;
  double ceiling = 0;
  double ceiling_tflops = 0;
  std::string ids;
  int world = 0;
  int solo_rank = 0;
  bool pair = false;
};

void add_prediction(Options& o, Asked& a, const char* unit) {
  o.number(
      "--predict", unit, a.expected,
      "What you expect, stored with the result: a prediction made before the run. [default: none]");
}

void add_fill(Options& o, BenchRequest& r, Asked& a) {
  o.choice(
      "--fill", {"auto", "prefill", "fabricate"}, 0,
      [&r](std::size_t i) { r.fill = static_cast<Fill>(i); },
      "How --depth positions are made. auto: a real prefill up to 1024 of them, fabricated rows "
      "beyond.");
  o.text(
      "--ids", "IDS", a.ids,
      "Token ids, separated by blanks, instead of seeded ones; their number takes the place of the "
      "option that says how many.");
  o.number("--seed", "N", r.config.sampler.seed,
           "Of the ids, of fabricated rows and of synthetic weights.");
}

void add_ceilings(Options& o, Asked& a) {
  o.number("--ceiling-gbs", "X", a.ceiling,
           "GB/s that one rank's memory reaches (k3bench ceilings); floors are computed from it. "
           "[default: none]");
}

void add_partial(Options& o, BenchRequest& r, Asked& a) {
  o.number(
      "--world", "W", a.world,
      "With --solo-rank or --pair: the ranks of the whole world, as one tensor-parallel group. "
      "[default: --tp]");
  o.number("--solo-rank", "R", a.solo_rank,
           "Runs rank R of --world ranks alone: its bands, all layers, what it would say to the "
           "others replaced by a copy of the same size on its device. Its text means nothing, and "
           "its times exclude the network. [default: all ranks are there]");
  o.flag("--pair", a.pair,
         "On two ranks: ranks 0 and 1 of --world ranks, which speak to each other; the others' "
         "parts are missing, and the text means nothing.");
  o.flag("--trace", r.trace,
         "After the timed part: a few more steps, each phase of them timed on the device; a table, "
         "and the timeline in the log. Steps run without a graph then.");
}

// --solo-rank and --pair: one tensor-parallel group of --world ranks.
void settle_partial(BenchRequest& r, const Options& o, const Asked& a) {
  const bool solo = o.given("--solo-rank");
  if (!solo && !a.pair) {
    if (o.given("--world"))
      throw std::invalid_argument("--world: only with --solo-rank or --pair; else mpirun says it");
    return;
  }
  if (solo && a.pair) throw std::invalid_argument("--solo-rank and --pair: give one of the two");
  Layout& layout = r.config.layout;
  const int world = o.given("--world") ? a.world : layout.tp;
  r.job.first_rank = solo ? a.solo_rank : 0;
  r.job.n_present = solo ? 1 : 2;
  if (world < 1 || world > 64)
    throw std::invalid_argument(fmt::format("--world {}: outside 1 to 64 (or give --tp)", world));
  if (layout.pp != 1)
    throw std::invalid_argument(fmt::format(
        "--pp {}: a world of which only some ranks are there has one stage", layout.pp));
  if (o.given("--tp") && layout.tp != world)
    throw std::invalid_argument(fmt::format("--tp {}: --world {} is one group", layout.tp, world));
  if (r.job.first_rank < 0 || r.job.first_rank + r.job.n_present > world)
    throw std::invalid_argument(fmt::format("--{} {}: the world has {} ranks",
                                            solo ? "solo-rank" : "pair, --world",
                                            solo ? a.solo_rank : world, world));
  r.job.partial_world = layout.tp = world;
}

void add_machine(Options& o, BenchRequest& r) {
  add_sequence_options(o, r.config);
  add_world_options(o, r.config);
  add_log_options(o, r.config);
}

std::optional<double> positive(const Options& o, const char* name, double value) {
  if (!o.given(name)) return std::nullopt;
  if (!(value > 0)) throw std::invalid_argument(fmt::format("{} {}: must be over 0", name, value));
  return value;
}

// Returns false where a page was asked for.
bool parsed(Options& o, const std::vector<std::string>& args) {
  const Options::Outcome outcome = o.parse(args);
  if (outcome == Options::Outcome::kHelp) std::fputs(o.help().c_str(), stdout);
  if (outcome == Options::Outcome::kVersion)
    std::fputs(full_version_text("k3bench").c_str(), stdout);
  return outcome == Options::Outcome::kRun;
}

// --ctx as long as the sequence will be, unless it was given.
void settle_context(BenchRequest& r, std::int64_t n_position) {
  if (r.config.n_ctx == 0) r.config.n_ctx = n_position;
  if (r.config.n_ctx < n_position) {
    throw std::invalid_argument(
        fmt::format("--ctx {}: the benchmark needs {} positions", r.config.n_ctx, n_position));
  }
}

void keep_option(BenchRequest& r, const char* name, const std::string& value) {
  r.options.emplace_back(name, value);
}

void keep_common(BenchRequest& r) {
  constexpr const char* kFills[] = {"auto", "prefill", "fabricate"};
  keep_option(r, "tokens", std::to_string(r.n_tok));
  keep_option(r, "depth", std::to_string(r.depth));
  keep_option(r, "warmup", std::to_string(r.warmup));
  keep_option(r, "fill", kFills[static_cast<std::size_t>(r.fill)]);
  keep_option(r, "ids", r.ids.empty() ? "seeded" : "given");
  keep_option(r, "trace", r.trace ? "yes" : "no");
  if (r.job.partial_world == 0) return;
  keep_option(r, "world", std::to_string(r.job.partial_world));
  keep_option(r, r.job.n_present == 1 ? "solo-rank" : "pair", std::to_string(r.job.first_rank));
}

void add_model(Options& o, BenchRequest& r) {
  add_model_options(o, r.config);
  o.text("--synthetic", "SHAPE", r.config.synthetic,
         "Instead of a file: the weights that k3synth would write for this preset, made straight "
         "into device memory from --seed (1 where that is not given): tiny, k3-nano, k3-8l, k3-16l "
         "or k3-full, and what differs from it by the names of k3synth's options: "
         "k3-8l,layers=4,quant=Q8_0. [default: none]");
}

void use_model(BenchRequest& r, const Options& o) {
  if (!r.config.synthetic.empty()) {
    if (o.given("--model"))
      throw std::invalid_argument("--model and --synthetic: give one of the two");
    if (o.given("--seed")) r.config.synthetic_seed = r.config.sampler.seed;
  } else if (!o.given("--model")) {
    r.config.model = default_model();
  }
  r.config.sampler.temp = 0;
}

bool parse_decode(BenchRequest& r, const std::vector<std::string>& args) {
  Asked a;
  r.n_tok = 128;
  r.depth = 128;
  r.warmup = 16;
  Options o = options_of("decode", " --depth D", kDecodeAbout, kDecodeExamples);
  add_model(o, r);
  o.group("Benchmark");
  o.number("--depth", "D", r.depth, "Positions in the sequence before the first drawn token.");
  o.number("-n,--tokens", "N", r.n_tok, "Timed tokens.");
  o.number("--warmup", "N", r.warmup, "Untimed tokens before them.");
  add_fill(o, r, a);
  add_ceilings(o, a);
  o.number(
      "--check", "N", r.job.check,
      "Holds the first N timed tokens against the exact path, from the same state: arg-max and "
      "KLD of each. Loads the model twice. [default: none]");
  add_partial(o, r, a);
  add_prediction(o, a, "MS");
  add_machine(o, r);
  if (!parsed(o, args)) return false;
  use_model(r, o);
  if (o.given("--ids")) {
    if (o.given("--depth")) throw std::invalid_argument("--ids and --depth: give one of the two");
    r.ids = parse_ids(a.ids, "--ids");
    r.depth = static_cast<std::int64_t>(r.ids.size());
  }
  require("--depth", r.depth, 1);
  require("--tokens", r.n_tok, 1);
  require("--warmup", r.warmup, 0);
  if (!r.ids.empty() && r.fabricates()) {
    throw std::invalid_argument("--ids: not with fabricated rows; --fill prefill runs them");
  }
  r.expected = positive(o, "--predict", a.expected);
  r.ceiling_gb_s = positive(o, "--ceiling-gbs", a.ceiling);
  require("--check", r.job.check, 0);
  if (r.job.check > r.n_tok)
    throw std::invalid_argument(
        fmt::format("--check {}: there are {} timed tokens", r.job.check, r.n_tok));
  settle_partial(r, o, a);
  if (r.job.check > 0 && r.job.partial_world > 0)
    throw std::invalid_argument("--check: the text of a partial world means nothing");
  settle_context(r, r.depth + r.warmup + r.n_tok + (r.trace ? BenchRequest::kTraced : 0));
  keep_common(r);
  return true;
}

// What is reused must have been read.
void settle_reuse(BenchRequest& r) {
  if (r.depth < 1) throw std::invalid_argument("--reuse: needs --depth, the positions to reuse");
  if (r.fill == Fill::kFabricate)
    throw std::invalid_argument("--reuse: not with fabricated rows, which no prompt reads");
  if (r.trace || r.expected || r.ceiling_gb_s || r.ceiling_tflops)
    throw std::invalid_argument("--reuse: not with --trace, --predict or ceilings");
  r.fill = Fill::kPrefill;
  r.config.n_slot = 2;
}

bool parse_prefill(BenchRequest& r, const std::vector<std::string>& args) {
  Asked a;
  r.n_tok = 512;
  r.warmup = 1;
  r.repeat = 3;
  Options o = options_of("prefill", " --tokens N", kPrefillAbout, kPrefillExamples);
  add_model(o, r);
  o.group("Benchmark");
  o.number("-n,--tokens", "N", r.n_tok, "Tokens of the prompt.");
  o.number("--depth", "D", r.depth, "Positions in the sequence before the prompt.");
  o.number("--repeat", "R", r.repeat, "Timed times.");
  o.number("--warmup", "N", r.warmup, "Untimed times before them.");
  o.flag("--reuse", r.reuse, "Times prompts that share the --depth positions before them.");
  add_fill(o, r, a);
  add_ceilings(o, a);
  o.number(
      "--ceiling-tflops", "X", a.ceiling_tflops,
      "TFLOP/s that one rank's products reach (k3bench ceilings); floors are computed from it. "
      "[default: none]");
  add_partial(o, r, a);
  add_prediction(o, a, "TOK_S");
  add_machine(o, r);
  if (!parsed(o, args)) return false;
  use_model(r, o);
  if (o.given("--ids")) {
    if (o.given("--tokens")) throw std::invalid_argument("--ids and --tokens: give one of the two");
    r.ids = parse_ids(a.ids, "--ids");
    r.n_tok = static_cast<std::int64_t>(r.ids.size());
  }
  require("--tokens", r.n_tok, 1);
  require("--depth", r.depth, 0);
  require("--repeat", r.repeat, 1);
  require("--warmup", r.warmup, 0);
  r.expected = positive(o, "--predict", a.expected);
  r.ceiling_gb_s = positive(o, "--ceiling-gbs", a.ceiling);
  r.ceiling_tflops = positive(o, "--ceiling-tflops", a.ceiling_tflops);
  settle_partial(r, o, a);
  settle_context(r, r.depth + r.n_tok);
  if (r.reuse) settle_reuse(r);
  keep_common(r);
  keep_option(r, "repeat", std::to_string(r.repeat));
  keep_option(r, "reuse", r.reuse ? "yes" : "no");
  return true;
}

bool parse_load(BenchRequest& r, const std::vector<std::string>& args) {
  Asked a;
  Options o = options_of("load", "", kLoadAbout, kLoadExamples);
  add_model_options(o, r.config);
  o.group("Benchmark");
  o.flag("--evict", r.job.evict,
         "Asks the kernel to drop the model's files from the page cache before loading and again "
         "before the raw read. Slows down whoever else uses them.");
  add_prediction(o, a, "GB_S");
  add_machine(o, r);
  if (!parsed(o, args)) return false;
  use_model(r, o);
  r.expected = positive(o, "--predict", a.expected);
  keep_option(r, "evict", r.job.evict ? "yes" : "no");
  return true;
}

// ceilings and collective: no model, only the machine.
bool parse_bare(BenchRequest& r, const std::vector<std::string>& args, const char* name,
                const char* about, const char* examples) {
  Asked a;
  Options o({std::string("k3bench ") + name,
             std::string("k3bench ") + name + " [options]\nmpirun -n P k3bench " + name + " ...",
             std::string(about) + kOutputAbout, examples});
  o.group("Benchmark");
  o.number("--most-bytes", "B", r.job.most_bytes, "The largest buffer or message.");
  r.job.repeat = 15;
  o.number("--repeat", "R", r.job.repeat, "Timed times of each.");
  add_prediction(o, a, "X");
  add_world_options(o, r.config);
  add_log_options(o, r.config);
  if (!parsed(o, args)) return false;
  require("--most-bytes", r.job.most_bytes, 4096);
  require("--repeat", r.job.repeat, 1);
  r.config.synthetic = "none";  // there is no model to check
  r.expected = positive(o, "--predict", a.expected);
  keep_option(r, "most-bytes", std::to_string(r.job.most_bytes));
  keep_option(r, "repeat", std::to_string(r.job.repeat));
  return true;
}

bool parse_ceilings(BenchRequest& r, const std::vector<std::string>& args) {
  r.job.most_bytes = std::int64_t{1} << 30;
  return parse_bare(r, args, "ceilings", kCeilingsAbout, kCeilingsExamples);
}

bool parse_collective(BenchRequest& r, const std::vector<std::string>& args) {
  r.job.most_bytes = std::int64_t{64} << 20;
  return parse_bare(r, args, "collective", kCollectiveAbout, kCollectiveExamples);
}

}  // namespace

const char* BenchRequest::command_name() const {
  constexpr const char* kNames[] = {"decode", "prefill", "load", "ceilings", "collective"};
  return kNames[static_cast<std::size_t>(job.command)];
}

bool parse_bench(BenchRequest& r, const std::vector<std::string>& all) {
  std::vector<std::string> args = all;
  const std::string command = args.empty() ? "" : args[0];
  if (!args.empty()) args.erase(args.begin());
  using Command = BenchJob::Command;
  const auto with = [&](Command c, auto parse) {
    r.job.command = c;
    if (!parse(r, args)) return false;
    // As text, so that "none" and a number share a name in every log.
    keep_option(r, "predict", r.expected ? fmt::format("{}", *r.expected) : "");
    if (c == Command::kDecode || c == Command::kPrefill)
      keep_option(r, "ceiling-gbs", r.ceiling_gb_s ? fmt::format("{}", *r.ceiling_gb_s) : "");
    check(r.config);
    return true;
  };
  if (command == "decode") return with(Command::kDecode, parse_decode);
  if (command == "prefill") return with(Command::kPrefill, parse_prefill);
  if (command == "load") return with(Command::kLoad, parse_load);
  if (command == "ceilings") return with(Command::kCeilings, parse_ceilings);
  if (command == "collective") return with(Command::kCollective, parse_collective);
  if (command == "--help" || command == "-h") return std::fputs(kHelp, stdout), false;
  if (command == "--version")
    return std::fputs(full_version_text("k3bench").c_str(), stdout), false;
  throw std::invalid_argument(
      command.empty() ? "a command is missing: decode, prefill, load, ceilings or collective; "
                        "k3bench --help"
                      : command +
                            ": not a command; decode, prefill, load, ceilings or collective; "
                            "k3bench --help");
}

}  // namespace k3
