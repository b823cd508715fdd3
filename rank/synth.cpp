#include "rank/synth.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <stdexcept>
#include <thread>

namespace k3 {
namespace {

constexpr std::uint64_t kChunkBytes = std::uint64_t{4} << 20;  // per thread and turn

// Blocks [first, first + n) into `to`.
void make_blocks(const SynthTensor& t, std::uint64_t first, std::uint64_t n, std::byte* to) {
  const int n_byte = traits(t.type).bytes;
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  for (std::uint64_t i = 0; i < n; ++i, out += n_byte) synth_block(t, first + i, out, n_byte);
}

// Makes a tensor in turns: each thread fills its part of the buffer, then the whole goes out in order.
class TensorMaker {
 public:
  explicit TensorMaker(int threads) : threads_(static_cast<std::uint64_t>(threads)) {
    buffer_.resize(kChunkBytes * threads_);
  }

  void make(const SynthTensor& t, std::uint64_t n_block, const Put& put) {
    const auto size = static_cast<std::uint64_t>(traits(t.type).bytes);
    const std::uint64_t turn = kChunkBytes / size * threads_;
    for (std::uint64_t first = 0; first < n_block; first += turn) {
      const std::uint64_t n = std::min(turn, n_block - first);
      fill(t, first, n, size);
      put(std::span<const std::byte>(buffer_.data(), n * size));
    }
  }

 private:
  void fill(const SynthTensor& t, std::uint64_t first, std::uint64_t n, std::uint64_t size) {
    constexpr std::uint64_t kWorthThreads = 4096;
    const std::uint64_t teams = n < kWorthThreads ? 1 : threads_;
    std::vector<std::jthread> team;
    for (std::uint64_t i = 1; i < teams; ++i) {
      const std::uint64_t begin = n * i / teams, end = n * (i + 1) / teams;
      team.emplace_back([this, &t, first, begin, end, size] {
        make_blocks(t, first + begin, end - begin, buffer_.data() + begin * size);
      });
    }
    make_blocks(t, first, n / teams, buffer_.data());
  }  // joins

  std::uint64_t threads_;
  std::vector<std::byte> buffer_;
};

std::int64_t size_of(std::string_view text, std::string_view value) {
  std::int64_t n = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
  if (error == std::errc() && end == value.data() + value.size() && n >= 0) return n;
  throw std::invalid_argument("synthetic model " + std::string(text) + ": '" + std::string(value) +
                              "' is not a size");
}

// One NAME=VALUE of a synthetic model.
void change(SynthModel& m, std::string_view text, std::string_view part) {
  const std::size_t equals = part.find('=');
  const std::string_view name = part.substr(0, equals);
  const std::string_view value =
      equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
  if (name == "quant") {
    m.recipe = QuantRecipe::parse(value);
    return;
  }
  for (const ShapeSize& s : shape_sizes()) {
    if (name != s.name) continue;
    m.shape.*s.size = size_of(text, value);
    return;
  }
  throw std::invalid_argument("synthetic model " + std::string(text) + ": '" + std::string(part) +
                              "' is no quant=RECIPE and no size (layers=N, heads=N, ...: the "
                              "options of k3synth)");
}

}  // namespace

SynthModel parse_synth_model(std::string_view text) {
  SynthModel m;
  m.shape = named_shape(text.substr(0, text.find(',')));
  for (std::size_t at = text.find(','); at != std::string_view::npos;) {
    const std::size_t next = text.find(',', at + 1);
    change(m, text, text.substr(at + 1, next == std::string_view::npos ? next : next - at - 1));
    at = next;
  }
  return m;
}

ModelFile synthetic_outline(std::string_view text, std::uint64_t seed) {
  const SynthModel m = parse_synth_model(text);
  const ModelOutline outline = outline_of(m.shape, m.recipe);
  return ModelFile::outline("synthetic " + std::string(text) + " seed " + std::to_string(seed),
                            metadata_of(outline), tensors_of(outline));
}

SynthTensor synth_tensor(Role role, const TensorDecl& decl, std::uint64_t seed) {
  SynthTensor t;
  t.type = decl.type;
  t.key = synth_key(seed, decl.name.data(), decl.name.size());
  const float unit = 1.0f / std::sqrt(static_cast<float>(decl.dims.at(0)));
  switch (role) {
    case Role::kOutputNorm:
    case Role::kAttnNorm:
    case Role::kFfnNorm:
    case Role::kKdaNorm:
    case Role::kMlaQANorm:
    case Role::kMlaKvANorm:
    case Role::kRoutedNorm:
      t.kind = SynthKind::kNorm;
      t.sigma = 0.25f;
      break;
    case Role::kKdaA:
      t.kind = SynthKind::kDecay;
      break;
    case Role::kKdaDt:
      t.kind = SynthKind::kDt;
      break;
    case Role::kRouterBias:
      t.sigma = 0.05f;  // shifts the choice, does not make it
      break;
    case Role::kTokenEmbd:
      t.sigma = 1.0f;
      break;
    case Role::kOutput:
      t.sigma = 3.0f * unit;
      break;
    case Role::kRouter:
      t.sigma = 1.5f * unit;
      break;
    default:
      t.sigma = unit;
      break;
  }
  return t;
}

std::vector<std::string> write_synthetic(const std::string& path, const SynthOptions& options,
                                         const SynthProgress& progress) {
  if (options.threads < 1) throw std::invalid_argument("threads: expected at least 1");
  const ModelOutline outline = outline_of(options.shape, options.recipe);
  const std::vector<TensorInfo> infos = tensors_of(outline);
  MetadataEntries metadata = outline.metadata;
  for (auto& entry : synth_vocabulary(options.shape.n_vocab)) metadata.push_back(std::move(entry));
  // What no program here could read is not written.
  std::vector<std::string> dialects;
  Plan::make(read_model_config(metadata_of(outline), infos, path, dialects), infos, Layout{}, path);

  std::uint64_t total = 0, done = 0;
  for (const TensorInfo& t : infos) total += t.bytes;
  TensorMaker maker(options.threads);
  const Fill fill = [&](std::size_t i, const TensorDecl& decl, const Put& put) {
    const SynthTensor t = synth_tensor(outline.roles.at(i), decl, options.seed);
    const auto n_block = decl.bytes() / static_cast<std::uint64_t>(traits(decl.type).bytes);
    maker.make(t, n_block, [&](std::span<const std::byte> bytes) {
      put(bytes);
      done += bytes.size();
      if (progress) progress(done, total);
    });
  };
  return write_gguf(path, metadata, outline.tensors, options.file, fill);
}

}  // namespace k3
