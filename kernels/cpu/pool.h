// The threads of one rank. The calling thread is one of them: run() hands a function to all, takes its own part and
// returns when the others are done. A thread that waits spins for some tens of microseconds, as long as the gap between
// two ops, and then sleeps: it never holds a core that somebody else could use for longer than that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace k3::cpu {

struct PoolOptions {
  int threads = 1;
  std::vector<int> cpus;  // operating-system numbers, one a thread; empty: the scheduler's choice
  bool crowded = false;   // more threads than cores on this machine: do not spin at all
};

class Pool {
 public:
  // Starts the threads and binds each but the calling one to its CPU. Throws std::system_error where the system refuses.
  explicit Pool(PoolOptions options);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Binds the calling thread, once. Threads that it starts later inherit its one CPU, so not before it computes.
  void bind_caller();

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // f(thread) once on each thread, 0 .. size() - 1. The first exception is rethrown here. Not to be nested.
  template <class F>
  void run(F&& f) {
    using Call = std::remove_reference_t<F>;
    run_call({[](const void* c, int t) { (*static_cast<Call*>(const_cast<void*>(c)))(t); },
              static_cast<const void*>(&f)});
  }

  // f(begin, end, thread) over [0, n), one run a thread; all on the calling thread where n pieces of `cost` (in
  // multiply-adds or the like) are not worth waking the others.
  template <class F>
  void split(std::int64_t n, std::int64_t cost, F&& f) {
    if (n <= 0) return;
    if (!worth_sharing(n, cost)) return f(std::int64_t{0}, n, 0);
    run([&](int t) {
      const std::int64_t begin = n * t / size(), end = n * (t + 1) / size();
      if (begin < end) f(begin, end, t);
    });
  }

  // The same with pieces taken one after another, for pieces that differ in cost.
  template <class F>
  void deal(std::int64_t n, std::int64_t cost, F&& f) {
    if (n <= 0) return;
    if (!worth_sharing(n, cost)) return f(std::int64_t{0}, n, 0);
    std::atomic<std::int64_t> next{0};
    run([&](int t) {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i, i + 1, t);
    });
  }

  // At least n floats for each thread, 64-byte aligned, first touched by the thread that uses them. Call it outside run().
  void reserve(std::size_t n);
  float* scratch(int thread) const { return scratch_[static_cast<std::size_t>(thread)].get(); }

 private:
  struct Call {
    void (*invoke)(const void*, int) = nullptr;
    const void* f = nullptr;
  };
  struct Free {
    void operator()(float* p) const;
  };

  // About a microsecond of arithmetic, what it costs to hand work over.
  static constexpr std::int64_t kWorthWaking = 16384;
  bool worth_sharing(std::int64_t n, std::int64_t cost) const {
    return size() > 1 && n > 1 && n * cost >= kWorthWaking;
  }
  void run_call(Call call);
  void work(int thread);
  void invoke(int thread);

  PoolOptions options_;
  bool bound_ = false;  // the calling thread
  std::vector<std::thread> workers_;
  std::vector<std::unique_ptr<float, Free>> scratch_;
  std::size_t scratch_elems_ = 0;

  Call call_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  bool stop_ = false;
  // On lines of their own: each is polled by threads while another writes the other.
  alignas(64) std::atomic<std::uint32_t> round_{0};
  alignas(64) std::atomic<std::uint32_t> pending_{0};
};

}  // namespace k3::cpu
