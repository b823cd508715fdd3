#include "rank/run_config.h"

#include <cstring>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include <fmt/core.h>

namespace k3 {
namespace {

const char* policy_name(ShardPolicy p) { return p == ShardPolicy::kFull ? "full" : "experts-only"; }

const char* cache_name(CacheType t) {
  return t == CacheType::kF32 ? "f32" : t == CacheType::kF16 ? "f16" : "bf16";
}

// The one list of fields: what is printed, logged and sent follows from it.
template <class Config, class Visit>
void each_option(Config& c, const Visit& visit) {
  visit("model", c.model);
  visit("synthetic", c.synthetic);
  visit("synthetic-seed", c.synthetic_seed);
  visit("ignore-split-count", c.ignore_split_count);
  visit("tp", c.layout.tp);
  visit("pp", c.layout.pp);
  visit("policy", c.layout.policy);
  visit("expert-groups", c.layout.expert_groups);
  visit("kv-shard", c.layout.kv_shard);
  visit("backend", c.backend);
  visit("comm", c.comm);
  visit("precision", c.precision);
  visit("reproducible", c.reproducible);
  visit("share-gpu", c.share_gpu);
  visit("threads", c.threads);
  visit("bind", c.bind);
  visit("cpu-kernels", c.cpu_kernels);
  visit("time-limit", c.time_limit_s);
  visit("ctx", c.n_ctx);
  visit("chunk", c.chunk_tok);
  visit("slots", c.n_slot);
  visit("cache", c.cache);
  visit("cache-auto", c.cache_auto);
  visit("predict", c.n_predict);
  visit("control-tokens", c.control_tokens);
  visit("ignore-eos", c.ignore_eos);
  visit("temp", c.sampler.temp);
  visit("top-k", c.sampler.top_k);
  visit("top-p", c.sampler.top_p);
  visit("min-p", c.sampler.min_p);
  visit("repetition-penalty", c.sampler.repetition_penalty);
  visit("presence-penalty", c.sampler.presence_penalty);
  visit("seed", c.sampler.seed);
  visit("log", c.log);
}

template <class T>
std::string spelled(const T& v) {
  if constexpr (std::is_same_v<T, ShardPolicy>) {
    return policy_name(v);
  } else if constexpr (std::is_same_v<T, CacheType>) {
    return cache_name(v);
  } else if constexpr (std::is_same_v<T, Precision>) {
    return v == Precision::kFast ? "fast" : "exact";
  } else if constexpr (std::is_same_v<T, bool>) {
    return v ? "yes" : "no";
  } else {
    return fmt::format("{}", v);
  }
}

template <class T>
void require_range(const char* option, T value, T low, T high, const char* what) {
  // Written so that a NaN is refused.
  if (value >= low && value <= high) return;
  throw std::invalid_argument(
      fmt::format("--{} {}: must lie in {} to {} ({})", option, value, low, high, what));
}

}  // namespace

void settle(RunConfig& c) {
  const bool cuda = c.backend == "cuda";
  if (c.cache_auto) c.cache = cuda ? CacheType::kF16 : CacheType::kF32;
  c.cache_auto = false;
  if (c.time_limit_s == kAutoTimeLimit) c.time_limit_s = cuda ? 10 : 60;
}

void check(const RunConfig& c) {
  if (c.model.empty() && c.synthetic.empty()) throw std::invalid_argument("--model: is empty");
  require_range("tp", c.layout.tp, 0, 64, "ranks; 0: as many as there are / pp");
  require_range("pp", c.layout.pp, 1, 1024, "stages");
  require_range("expert-groups", c.layout.expert_groups, 0, 1024, "groups; 0: chosen");
  if (c.layout.tp > 0 && c.layout.expert_groups > 0 && c.layout.tp % c.layout.expert_groups != 0) {
    throw std::invalid_argument(fmt::format("--expert-groups {}: must divide --tp {}",
                                            c.layout.expert_groups, c.layout.tp));
  }
  if (c.backend != "cpu" && c.backend != "cuda") {
    throw std::invalid_argument(fmt::format("--backend {}: not one of cpu, cuda", c.backend));
  }
  if (c.comm != "nccl" && c.comm != "peer" && c.comm != "mpi") {
    throw std::invalid_argument(fmt::format("--comm {}: not one of nccl, peer, mpi", c.comm));
  }
  require_range("threads", c.threads, 0, 1024, "per rank; 0: chosen");
  if (c.cpu_kernels != "best" && c.cpu_kernels != "plain" && c.cpu_kernels != "avx2" &&
      c.cpu_kernels != "avx512") {
    throw std::invalid_argument(
        fmt::format("--cpu-kernels {}: not one of best, plain, avx2, avx512", c.cpu_kernels));
  }
  if (c.time_limit_s != kAutoTimeLimit)
    require_range("time-limit", c.time_limit_s, 0.0, 1e6, "seconds; 0: never");
  const std::int64_t most_tok = std::int64_t{1} << 30;
  require_range<std::int64_t>("ctx", c.n_ctx, 0, most_tok,
                              "positions; 0: the model's limit, at most 4096");
  require_range<std::int64_t>("chunk", c.chunk_tok, 1, 1 << 20, "tokens");
  require_range("slots", c.n_slot, 1, 1 << 16, "sequences");
  require_range<std::int64_t>("predict", c.n_predict, 0, most_tok, "tokens");
  validate(c.sampler);
}

std::vector<std::pair<std::string, std::string>> describe(const RunConfig& config) {
  RunConfig settled = config;
  settle(settled);
  std::vector<std::pair<std::string, std::string>> out;
  each_option(settled, [&](const char* name, const auto& v) {
    if (name != std::string_view("cache-auto")) out.emplace_back(name, spelled(v));
  });
  return out;
}

std::string to_bytes(const RunConfig& config) {
  std::string out;
  each_option(config, [&](const char*, const auto& v) {
    using T = std::decay_t<decltype(v)>;
    if constexpr (std::is_same_v<T, std::string>) {
      const std::uint64_t n = v.size();
      out.append(reinterpret_cast<const char*>(&n), sizeof n);
      out += v;
    } else {
      static_assert(std::is_trivially_copyable_v<T>);
      out.append(reinterpret_cast<const char*>(&v), sizeof v);
    }
  });
  return out;
}

RunConfig run_config_from_bytes(const std::string& bytes) {
  RunConfig config;
  std::size_t at = 0;
  const auto need = [&](std::uint64_t n) {
    if (n > bytes.size() - at) {
      throw std::runtime_error(
          "options from rank 0: cut short; do all ranks run the same program?");
    }
  };
  const auto take = [&](auto& to) {
    need(sizeof to);
    std::memcpy(&to, bytes.data() + at, sizeof to);
    at += sizeof to;
  };
  each_option(config, [&](const char*, auto& v) {
    if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::string>) {
      std::uint64_t n = 0;
      take(n);
      need(n);
      v = bytes.substr(at, n);
      at += n;
    } else {
      take(v);
    }
  });
  if (at != bytes.size()) {
    throw std::runtime_error("options from rank 0: too long; do all ranks run the same program?");
  }
  return config;
}

}  // namespace k3
