#include "kernels/cpu/pool.h"

#include <cstdlib>
#include <new>
#include <utility>

#include "kernels/cpu/places.h"

namespace k3::cpu {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `word` is no longer `old`. The spin covers the gap between two ops; after it the thread sleeps.
std::uint32_t await_change(const std::atomic<std::uint32_t>& word, std::uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    const std::uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

constexpr int kSpins = 1500;

int spins(const PoolOptions& o) { return o.crowded ? 0 : kSpins; }

}  // namespace

void Pool::Free::operator()(float* p) const { std::free(p); }

Pool::Pool(PoolOptions options) : options_(std::move(options)) {
  if (options_.threads < 1) options_.threads = 1;
  scratch_.resize(static_cast<std::size_t>(options_.threads));
  try {
    for (int t = 1; t < options_.threads; ++t) workers_.emplace_back([this, t] { work(t); });
    run([](int) {});  // a thread that cannot be bound says so here
  } catch (...) {
    stop_ = true;
    round_.fetch_add(1);
    round_.notify_all();
    for (std::thread& w : workers_) w.join();
    throw;
  }
}

Pool::~Pool() {
  stop_ = true;
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& w : workers_) w.join();
}

void Pool::bind_caller() {
  if (bound_ || options_.cpus.empty()) return;
  bind_this_thread(options_.cpus.front());
  bound_ = true;
}

void Pool::reserve(std::size_t n) {
  if (n <= scratch_elems_) return;
  const std::size_t elems = (n + 1023) / 1024 * 1024;  // whole pages: threads share none
  for (auto& s : scratch_) {
    s.reset(static_cast<float*>(std::aligned_alloc(4096, elems * sizeof(float))));
    if (s == nullptr) throw std::bad_alloc();
  }
  scratch_elems_ = elems;
}

void Pool::invoke(int thread) {
  try {
    call_.invoke(call_.f, thread);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

void Pool::run_call(Call call) {
  call_ = call;
  pending_.store(static_cast<std::uint32_t>(workers_.size()), std::memory_order_relaxed);
  if (!workers_.empty()) {
    round_.fetch_add(1);
    round_.notify_all();
  }
  invoke(0);
  for (std::uint32_t left = pending_.load(std::memory_order_acquire); left != 0;) {
    left = await_change(pending_, left, spins(options_));
  }
  if (failed_.load()) {
    failed_.store(false);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void Pool::work(int thread) {
  std::exception_ptr unbound;
  try {
    if (!options_.cpus.empty()) bind_this_thread(options_.cpus[static_cast<std::size_t>(thread)]);
  } catch (...) {
    unbound = std::current_exception();
  }
  for (std::uint32_t seen = 0;;) {
    seen = await_change(round_, seen, spins(options_));
    if (stop_) return;
    if (unbound == nullptr) {
      invoke(thread);
    } else if (!failed_.exchange(true)) {
      error_ = unbound;
    }
    if (pending_.fetch_sub(1) == 1) pending_.notify_one();
  }
}

}  // namespace k3::cpu
