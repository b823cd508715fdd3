#include "kernels/probe.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cpu/pool.h"

namespace k3 {
namespace {

class CpuProbe final : public DeviceProbe {
 public:
  explicit CpuProbe(int threads)
      : pool_({threads, {}, false}), kept_(static_cast<std::size_t>(pool_.size())) {}

  void read(const std::byte* from, std::size_t bytes) override {
    const auto n = static_cast<std::int64_t>(bytes / sizeof(std::uint64_t));
    const auto* words = reinterpret_cast<const std::uint64_t*>(from);
    pool_.split(n, 1, [&](std::int64_t begin, std::int64_t end, int t) {
      std::uint64_t sum = 0;
      for (std::int64_t i = begin; i < end; ++i) sum += words[i];
      kept_[static_cast<std::size_t>(t)] += static_cast<float>(sum & 1);
    });
  }

  double multiply() override {
    constexpr int kWidth = 64, kTurns = 1 << 16;
    pool_.run([&](int t) {
      std::array<float, kWidth> a;
      for (int i = 0; i < kWidth; ++i)
        a[static_cast<std::size_t>(i)] = 1.0f + 0.001f * static_cast<float>(i);
      for (int turn = 0; turn < kTurns; ++turn) {
        for (float& v : a) v = v * 0.9999f + 0.0001f;
      }
      float sum = 0;
      for (const float v : a) sum += v;
      kept_[static_cast<std::size_t>(t)] += sum;  // so that the loop is not thrown away
    });
    return 2.0 * kWidth * kTurns * pool_.size();
  }
  const char* multiply_what() const override { return "f32, operands in registers"; }
  void nothing() override {}

 private:
  cpu::Pool pool_;
  std::vector<float> kept_;
};

}  // namespace

std::unique_ptr<DeviceProbe> make_cpu_probe(int threads) {
  return std::make_unique<CpuProbe>(threads);
}

}  // namespace k3
