// k3plan inspect: what a model's files say and hold; a manifest of it; what differs from an earlier one.
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/manifest.h"
#include "apps/options.h"
#include "apps/part_hash.h"
#include "apps/plan_commands.h"
#include "loader/atomic_file.h"
#include "loader/parts.h"
#include "rank/fault.h"
#include "rank/plan.h"
#include "rank/plan_report.h"
#include "rank/tokenizer.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

constexpr double kGiB = 1024.0 * 1024 * 1024;

const char* const kAbout =
    "Prints what a model's files say and hold: parts, keys, tensors by class and type, the\n"
    "tokenizer. With --manifest every part is hashed too (SHA-256 of chunks, several threads) and\n"
    "all of it written to a file; --compare names what differs from such a file: renamed, missing\n"
    "or changed parts, the tensors in which bytes changed, changed keys. Hashing that was\n"
    "interrupted or killed goes on where it stopped when the same command is given again: "
    "finished\n"
    "chunks are kept in FILE.partial (--compare: FILE.check.partial) until it is done.\n";

const char* const kExamples =
    "  k3plan inspect model-00001-of-00014.gguf\n"
    "  k3plan inspect model-00001-of-00014.gguf --manifest model.manifest.json\n"
    "  k3plan inspect model-00001-of-00014.gguf --compare model.manifest.json\n"
    "  k3plan inspect model-00001-of-00014.gguf --compare model.manifest.json --no-hash\n";

struct Request {
  std::string model;
  bool ignore_split_count = false;
  std::string manifest;
  std::string compare;
  bool no_hash = false;
  bool keys = false;
  int threads = 0;
  std::int64_t chunk_mib = 64;
};

volatile std::sig_atomic_t g_stop_asked = 0;

void stop_between_chunks() {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (std::signal(signal, [](int) { g_stop_asked = 1; }) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
}

// ---- what the files say -------------------------------------------------------------------------------------------------

std::string size_text(std::uint64_t bytes) {
  const auto n = static_cast<double>(bytes);
  return n >= kGiB ? fmt::format("{:.2f} GiB", n / kGiB)
                   : fmt::format("{:.2f} MiB", n * 1024 / kGiB);
}

std::string parts_text(const ModelFile& file) {
  std::string out;
  for (const PartInfo& p : file.parts())
    out += fmt::format("{}  {} bytes, {} tensors\n", p.path, p.bytes, p.n_tensors);
  return out +
         fmt::format(
             "{} part{}, {} tensors, {} of tensors ({} bytes), {} bytes of files, fingerprint {}\n",
             file.parts().size(), file.parts().size() == 1 ? "" : "s", file.tensors().size(),
             size_text(file.tensor_bytes()), file.tensor_bytes(), file.bytes(), file.fingerprint());
}

std::string keys_text(const Metadata& meta) {
  std::string out = fmt::format("\n{} keys\n", meta.entries().size());
  for (const auto& [key, value] : meta.entries())
    out += fmt::format("  {:<48} {}\n", printable(key), value_text(value));
  return out;
}

struct Sum {
  std::size_t n = 0;
  std::uint64_t weights = 0;
  std::uint64_t bytes = 0;
};

// By class where the file is a K3, by type alone where it is not; why not goes to `fault`.
std::map<std::string, std::string> classes_of(const ModelFile& file, std::string& fault) {
  std::map<std::string, std::string> out;
  try {
    std::vector<std::string> dialects;
    const std::string& name = file.parts().front().path;
    const ModelConfig c = read_model_config(file.metadata(), file.tensors(), name, dialects);
    const Plan plan = Plan::make(c, file.tensors(), {}, name);
    for (const PlannedTensor& t : plan.tensors()) {
      out[t.name] = class_name(class_of(t.role));
      if (!t.name2.empty()) out[t.name2] = out[t.name];
    }
  } catch (const std::invalid_argument& e) {
    fault = e.what();
  }
  return out;
}

std::string tensors_text(const ModelFile& file) {
  std::string fault;
  const auto classes = classes_of(file, fault);
  std::map<std::pair<std::string, std::string>, Sum> sums;
  for (const TensorInfo& t : file.tensors()) {
    const auto it = classes.find(t.name);
    Sum& s = sums[{it == classes.end() ? "-" : it->second, traits(t.type).name}];
    ++s.n;
    s.weights += static_cast<std::uint64_t>(t.n_elem());
    s.bytes += t.bytes;
  }
  const auto line = [](const std::string& of, const std::string& type, const Sum& s) {
    return fmt::format("  {:<12} {:<8} {:>7} {:>16} {:>12} {:>8.4f}\n", of, type, s.n, s.weights,
                       size_text(s.bytes),
                       8.0 * static_cast<double>(s.bytes) /
                           static_cast<double>(std::max<std::uint64_t>(s.weights, 1)));
  };
  std::string out = fmt::format("\n  {:<12} {:<8} {:>7} {:>16} {:>12} {:>8}\n", "class", "type",
                                "tensors", "weights", "bytes", "bits");
  Sum all;
  for (const auto& [of, s] : sums) {
    out += line(of.first, of.second, s);
    all = {all.n + s.n, all.weights + s.weights, all.bytes + s.bytes};
  }
  out += line("all", "", all);
  return fault.empty() ? out : out + "  k3run would refuse this model: " + fault + "\n";
}

std::string token_text(const Vocab& vocab, const char* name, std::optional<std::int32_t> id) {
  if (!id) return fmt::format("{} none", name);
  return fmt::format("{} {} {}", name, *id, printable(vocab.tokens[static_cast<std::size_t>(*id)]));
}

std::string tokenizer_text(const ModelFile& file) {
  try {
    const Tokenizer tokenizer(read_vocab(file.metadata(), file.parts().front().path));
    const Vocab& v = tokenizer.vocab();
    std::array<std::size_t, 6> n{};
    for (const std::int32_t type : v.types) ++n[static_cast<std::size_t>(type)];
    std::string stops;
    for (const std::int32_t id : tokenizer.stop_ids())
      stops += fmt::format("{}{}", stops.empty() ? "" : ", ", id);
    std::string out = fmt::format(
        "\ntokenizer: model {}, pre-tokenizer {}, {} tokens ({} normal, {} control, {} "
        "user-defined, {} unused, {} unknown)\n"
        "  {}; {}; {}; generation stops at {}\n",
        v.model, v.pre, v.tokens.size(), n[1], n[3], n[4], n[5], n[2], token_text(v, "bos", v.bos),
        token_text(v, "eos", v.eos), token_text(v, "pad", v.pad), stops.empty() ? "none" : stops);
    for (const std::string& w : tokenizer.warnings()) out += "  " + w + "\n";
    return out;
  } catch (const std::invalid_argument& e) {
    return fmt::format("\ntokenizer: k3run would refuse it: {}\n", e.what());
  }
}

// ---- hashes ---------------------------------------------------------------------------------------------------------------

// A line now and then; a live one on a terminal.
class Report {
 public:
  void operator()(const HashProgress& p) {
    if (!said_resumed_ && p.resumed > 0)
      print_line(fmt::format("resumed: {} of {} bytes were hashed before", p.resumed, p.total));
    said_resumed_ = true;
    if (g_stop_asked) throw Interrupted("stopped on request; the same command goes on from here");
    const auto now = Clock::now();
    if (now < next_ || p.done == p.total) return;
    next_ = now + (live_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
    const double s = std::chrono::duration<double>(now - start_).count();
    const double rate = static_cast<double>(p.done - p.resumed) / s;
    const std::string line =
        fmt::format("hashing {:.2f} of {:.2f} GB, {:.2f} GB/s, {:.0f} s left",
                    static_cast<double>(p.done) / 1e9, static_cast<double>(p.total) / 1e9,
                    rate / 1e9, static_cast<double>(p.total - p.done) / rate);
    if (live_) {
      std::fprintf(stderr, "\r%s\033[K", line.c_str());
      open_ = true;
    } else {
      print_line(line);
    }
  }
  ~Report() {
    if (open_) std::fputc('\n', stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_ = start_ + std::chrono::seconds(1);
  bool live_ = isatty(STDERR_FILENO) == 1;
  bool open_ = false;
  bool said_resumed_ = false;
};

std::vector<HashedPart> hashed(const Request& q, const ModelFile& file, std::uint64_t chunk_bytes,
                               const std::string& journal) {
  stop_between_chunks();
  std::vector<std::string> paths;
  for (const PartInfo& p : file.parts()) paths.push_back(p.path);
  Report report;
  HashOptions options;
  options.chunk_bytes = chunk_bytes;
  options.threads = q.threads;
  options.journal = journal;
  options.progress = [&](const HashProgress& p) { report(p); };
  return hash_parts(paths, options);
}

void write_manifest(const Request& q, const ModelFile& file) {
  Manifest m = manifest_of(file);
  m.chunk_bytes = static_cast<std::uint64_t>(q.chunk_mib) << 20;
  const std::string journal = q.manifest + ".partial";
  m.parts = hashed(q, file, m.chunk_bytes, journal);
  const std::string text = manifest_json(m);
  AtomicFile out(q.manifest);
  out.write(std::as_bytes(std::span(text)));
  out.commit();
  ::unlink(journal.c_str());
  std::string lines = "\n";
  for (const HashedPart& p : m.parts) lines += fmt::format("{}  {}\n", p.digest, p.file);
  write_out(lines + fmt::format("manifest: {}\n", q.manifest));
}

Manifest read_manifest(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  if (in) text << in.rdbuf();
  if (!in) throw std::system_error(errno, std::generic_category(), path);
  return parse_manifest(text.str(), path);
}

// Returns how many differences were printed.
std::size_t print_differences(const std::vector<std::string>& lines) {
  std::string out = "\n";
  for (const std::string& l : lines) out += "differs: " + l + "\n";
  write_out(out);
  return lines.size();
}

std::size_t compare(const Request& q, const Manifest& was, const ModelFile& file) {
  Manifest now = manifest_of(file);
  if (!q.no_hash) {
    const std::string journal = q.compare + ".check.partial";
    now.parts = hashed(q, file, was.chunk_bytes, journal);
    ::unlink(journal.c_str());
  }
  return print_differences(differences(was, now));
}

[[noreturn]] void differ(const Request& q, std::size_t n) {
  throw std::invalid_argument(
      fmt::format("{}: {} difference{} from {}", q.model, n, n == 1 ? "" : "s", q.compare));
}

// A model with a part missing cannot be opened, but what the manifest knows of it can be said.
std::optional<ModelFile> open_or_explain(const Request& q, const std::optional<Manifest>& was) {
  OpenOptions open;
  open.ignore_split_count = q.ignore_split_count;
  try {
    return ModelFile::open(q.model, open);
  } catch (const std::exception&) {
    if (!was) throw;
    const auto lines = missing_parts(*was, fs::path(q.model).parent_path().string(), q.threads);
    if (lines.empty()) throw;
    differ(q, print_differences(lines));
  }
}

int run(const Request& q) {
  std::optional<Manifest> was;
  if (!q.compare.empty()) was = read_manifest(q.compare);
  const std::optional<ModelFile> file = open_or_explain(q, was);
  for (const std::string& w : file->warnings()) print_line("warning: " + w);
  write_out(parts_text(*file) + (q.keys ? keys_text(file->metadata()) : "") + tensors_text(*file) +
            tokenizer_text(*file));
  if (!q.manifest.empty()) write_manifest(q, *file);
  if (!was) return 0;
  if (const std::size_t n = compare(q, *was, *file); n > 0) differ(q, n);
  write_out(
      q.no_hash
          ? "the same keys, tensors, names and sizes as in the manifest; bytes were not compared\n"
          : "the same as in the manifest, every byte\n");
  return 0;
}

void check(Request& q, const std::vector<std::string>& words) {
  if (words.size() != 1) throw std::invalid_argument("give one MODEL; k3plan inspect --help");
  q.model = words[0];
  if (!q.manifest.empty() && !q.compare.empty())
    throw std::invalid_argument("give --manifest FILE or --compare FILE, not both");
  if (q.no_hash && q.compare.empty()) throw std::invalid_argument("--no-hash belongs to --compare");
  if (q.threads < 0 || q.threads > 1024)
    throw std::invalid_argument(fmt::format("--threads {}: valid: 0 to 1024", q.threads));
  if (q.chunk_mib < 1 || q.chunk_mib > 4096)
    throw std::invalid_argument(fmt::format("--chunk-mib {}: valid: 1 to 4096", q.chunk_mib));
  if (q.threads == 0)
    q.threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16);
}

}  // namespace

int plan_inspect(const std::vector<std::string>& args) {
  Request q;
  std::vector<std::string> words;
  Options options({"k3plan inspect", "k3plan inspect MODEL [--manifest FILE | --compare FILE] ...",
                   kAbout, kExamples});
  options.words("MODEL", words, 1);
  options.group("Model");
  options.flag("--ignore-split-count", q.ignore_split_count,
               "Accepts a complete set of parts whose split.tensors.count is stale.");
  options.group("Output");
  options.flag("--keys", q.keys, "Prints every key and its value, too.");
  options.text("--manifest", "FILE", q.manifest, "Hashes the parts and writes all of it there.");
  options.text("--compare", "FILE", q.compare,
               "Names what differs from that manifest; exit code 2 if anything does.");
  options.flag("--no-hash", q.no_hash, "Compares without reading the tensors.");
  options.group("Hashing");
  options.number("--threads", "N", q.threads, "Threads. [default: the machine's, at most 16]");
  options.number("--chunk-mib", "N", q.chunk_mib, "Size of a chunk in a new manifest.");
  switch (options.parse(args)) {
    case Options::Outcome::kHelp:
      write_out(options.help());
      return 0;
    case Options::Outcome::kVersion:
      write_out(version_text("k3plan") + "\n");
      return 0;
    case Options::Outcome::kRun:
      break;
  }
  check(q, words);
  return run(q);
}

}  // namespace k3
