// Peer memory as a kernel sees it: where every rank's window lies, and the device code that pushes words into the others'
// windows and waits for theirs. Plain data for C++; the functions are for nvcc alone. The one header of comm/ that kernels
// may include, so that an op can end in a sum or begin with one.
//
// A channel is a lane between the blocks of equal index on all ranks. Each channel counts its exchanges (epochs) in the
// rank's own memory, so that a graph can be replayed: nothing about an exchange comes from the host. Rules for a kernel:
//  - block b uses channel b alone, opens it, makes any number of exchanges on it, closes it;
//  - all ranks run the same kernels in the same order with the same number of blocks and exchanges;
//  - in every exchange a block gets at least one word (or a flag) from every rank, and reads all it wants of them before its
//    next exchange. That is what makes two slots enough: who is at epoch e has everyone's e - 1, sent after e - 2 was read;
//  - kernels that speak follow each other on one stream (with programmatic launch: open after griddepcontrol.wait).
//
// Two ways to move data:
//  - quick words: 8 bytes that hold a float and the epoch. No fence and no flag: one trip, twice the bytes;
//  - bulk: plain floats, then one flag a block (release and acquire at system scope): full bandwidth, two trips.
#pragma once

#include <cstddef>
#include <cstdint>

namespace k3 {

inline constexpr int kPeerMax = 64;  // ranks
inline constexpr int kPeerChannels = 64;
inline constexpr int kPeerQuickWords =
    1024;  // of one channel from one rank in one exchange; 2 floats each
inline constexpr int kPeerBulkFloats = 16384;  // likewise
inline constexpr int kPeerMailChannels = 32;
inline constexpr int kPeerMailFloats = 16384;

// Two floats and the epoch they belong to. Each half is written at once, the whole need not be.
struct alignas(16) PeerWord {
  float a;
  std::uint32_t epoch_a;
  float b;
  std::uint32_t epoch_b;
};

// Host memory that the device can reach: how a wait without end is ended, and told.
struct PeerControl {
  std::uint64_t limit_ns;  // host: a wait that takes longer is given up; 0: none is
  std::uint32_t abort;     // host or device: no wait goes on
  std::uint32_t gave_up;   // device: what follows holds the wait that was given up
  std::uint64_t call;      // its tag
  std::uint64_t waited_ns;
  std::uint32_t peer;  // the rank that did not come, as the world counts
  std::uint32_t
      n_waiting;  // device: counts up at the start and the end of a long wait; odd: one is under way
  std::uint64_t waiting_call;
  std::uint64_t waiting_since_ns;  // of the device's clock
  std::uint64_t waiting_now_ns;
  std::uint32_t waiting_peer;
};

// Where things lie in a window, in bytes. [parity][from][channel][...] each.
struct PeerLayout {
  int size = 1;
  constexpr std::size_t lane(int parity, int from, int channel) const {
    return (static_cast<std::size_t>(parity) * size + from) * kPeerChannels + channel;
  }
  constexpr std::size_t mail_lane(int parity, int from, int channel) const {
    return (static_cast<std::size_t>(parity) * size + from) * kPeerMailChannels + channel;
  }
  constexpr std::size_t quick(int parity, int from, int channel) const {
    return lane(parity, from, channel) * kPeerQuickWords * sizeof(PeerWord);
  }
  constexpr std::size_t bulk(int parity, int from, int channel) const {
    return quick(2, 0, 0) + lane(parity, from, channel) * kPeerBulkFloats * sizeof(float);
  }
  constexpr std::size_t mail(int parity, int from, int channel) const {
    return bulk(2, 0, 0) + mail_lane(parity, from, channel) * kPeerMailFloats * sizeof(float);
  }
  constexpr std::size_t bulk_flag(int parity, int from, int channel) const {
    return mail(2, 0, 0) + lane(parity, from, channel) * sizeof(std::uint32_t);
  }
  constexpr std::size_t mail_flag(int parity, int from, int channel) const {
    return bulk_flag(2, 0, 0) + mail_lane(parity, from, channel) * sizeof(std::uint32_t);
  }
  // Written by the rank that got the mail: the last epoch it has read.
  constexpr std::size_t mail_ack(int by, int channel) const {
    return mail_flag(2, 0, 0) + mail_lane(0, by, channel) * sizeof(std::uint32_t);
  }
  constexpr std::size_t bytes() const { return mail_ack(size, 0); }
};

// Passed to kernels by value.
struct PeerView {
  int rank = 0;
  PeerLayout layout;
  std::uint32_t* epoch =
      nullptr;  // [kPeerChannels], last one used; this rank's own memory, like the next three
  std::uint32_t* mail_sent = nullptr;  // [size][kPeerMailChannels]
  std::uint32_t* mail_got = nullptr;
  std::uint32_t* dead = nullptr;  // not 0 once a wait was given up: nothing is sent from then on
  PeerControl* control = nullptr;
  std::byte* window[kPeerMax] = {};  // every rank's, this one's own too
  int world_rank[kPeerMax] = {};
};

}  // namespace k3

#ifdef __CUDACC__

namespace k3::peer {

// What a thread knows of an exchange under way.
struct Channel {
  int index = 0;
  std::uint32_t epoch = 0;
  std::uint64_t call = 0;
  bool alive = true;  // false: a wait was given up; nothing is sent, and what is read means nothing
};

// 0 is what a fresh window holds, and parity must alternate over the wrap.
__device__ inline std::uint32_t next_epoch(std::uint32_t e) { return e == 0xffffffffu ? 2 : e + 1; }

__device__ inline std::uint32_t load_acquire(const std::uint32_t* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_release(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline PeerWord load_word(const PeerWord* p) {
  PeerWord w;
  asm volatile("ld.volatile.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=f"(w.a), "=r"(w.epoch_a), "=f"(w.b), "=r"(w.epoch_b)
               : "l"(p)
               : "memory");
  return w;
}
__device__ inline void store_word(PeerWord* p, PeerWord w) {
  asm volatile("st.volatile.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(w.a),
               "r"(w.epoch_a), "f"(w.b), "r"(w.epoch_b)
               : "memory");
}
__device__ inline std::uint64_t clock_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// A wait that counts its tries. Few of them look at the clock and at the host's memory: both cost more than a try.
class Wait {
 public:
  __device__ Wait(const PeerView& v, Channel& c, int peer) : v_(v), c_(c), peer_(peer) {}
  // True: go on waiting.
  __device__ bool again() {
    constexpr unsigned kTriesPerLook = 512;
    return ++tries_ % kTriesPerLook != 0 || look();
  }
  __device__ void done() {
    if (told_) count_wait();
  }

 private:
  template <class T>
  __device__ volatile T* at(T PeerControl::*member) const {
    return &(v_.control->*member);
  }
  __device__ bool look() {
    constexpr std::uint64_t kLong_ns = 20'000'000;
    const std::uint64_t now = clock_ns();
    if (begin_ == 0) begin_ = now;
    const std::uint64_t waited = now - begin_, limit = *at(&PeerControl::limit_ns);
    if (*at(&PeerControl::abort) != 0 || (limit != 0 && waited > limit)) {
      give_up(waited);
      return false;
    }
    if (waited > kLong_ns && c_.index == 0 && threadIdx.x == 0) tell(now);
    return true;
  }
  __device__ void count_wait() { *at(&PeerControl::n_waiting) = *at(&PeerControl::n_waiting) + 1; }
  __device__ void tell(std::uint64_t now) {
    *at(&PeerControl::waiting_now_ns) = now;
    if (told_) return;
    told_ = true;
    *at(&PeerControl::waiting_call) = c_.call;
    *at(&PeerControl::waiting_since_ns) = begin_;
    *at(&PeerControl::waiting_peer) = static_cast<std::uint32_t>(v_.world_rank[peer_]);
    __threadfence_system();
    count_wait();
  }
  __device__ void give_up(std::uint64_t waited) {
    c_.alive = false;
    const bool first = atomicExch(v_.dead, 1u) == 0;
    if (!first || *at(&PeerControl::abort) != 0) return;
    *at(&PeerControl::call) = c_.call;
    *at(&PeerControl::waited_ns) = waited;
    *at(&PeerControl::peer) = static_cast<std::uint32_t>(v_.world_rank[peer_]);
    __threadfence_system();
    *at(&PeerControl::gave_up) = 1;
    *at(&PeerControl::abort) = 1;
  }

  const PeerView& v_;
  Channel& c_;
  int peer_;
  unsigned tries_ = 0;
  std::uint64_t begin_ = 0;
  bool told_ = false;
};

// Begins the block's first exchange. Every thread calls it.
__device__ inline Channel open(const PeerView& v, std::uint64_t call) {
  Channel c;
  c.index = static_cast<int>(blockIdx.x);
  c.call = call;
  c.epoch = next_epoch(*static_cast<volatile std::uint32_t*>(v.epoch + c.index));
  c.alive = *static_cast<volatile std::uint32_t*>(v.dead) == 0;
  return c;
}
// Ends the exchange under way and begins the next one on the same channel.
__device__ inline void next(Channel& c) { c.epoch = next_epoch(c.epoch); }
// Every thread calls it, after its last exchange.
__device__ inline void close(const PeerView& v, const Channel& c) {
  __syncthreads();
  if (threadIdx.x == 0) v.epoch[c.index] = c.epoch;
}

// ---- quick words ------------------------------------------------------------------------------------------------------
// Word i of this rank's lane in the window of `to`, another rank.
__device__ inline void push_to(const PeerView& v, const Channel& c, int to, int i, float a,
                               float b) {
  if (!c.alive) return;
  const std::size_t at = v.layout.quick(c.epoch & 1, v.rank, c.index) + i * sizeof(PeerWord);
  store_word(reinterpret_cast<PeerWord*>(v.window[to] + at), {a, c.epoch, b, c.epoch});
}
// Word i of this rank's lane in the windows of all others.
__device__ inline void push(const PeerView& v, const Channel& c, int i, float a, float b) {
  if (!c.alive) return;
  const PeerWord w{a, c.epoch, b, c.epoch};
  const std::size_t at = v.layout.quick(c.epoch & 1, v.rank, c.index) + i * sizeof(PeerWord);
  // Each rank starts at its own next one, so that they do not all send to the same.
  for (int k = 1; k < v.layout.size; ++k) {
    const int to = v.rank + k < v.layout.size ? v.rank + k : v.rank + k - v.layout.size;
    store_word(reinterpret_cast<PeerWord*>(v.window[to] + at), w);
  }
}
__device__ inline const PeerWord* quick_lane(const PeerView& v, const Channel& c, int from) {
  return reinterpret_cast<const PeerWord*>(v.window[v.rank] +
                                           v.layout.quick(c.epoch & 1, from, c.index));
}
__device__ inline bool has_come(const Channel& c, const PeerWord& w) {
  return w.epoch_a == c.epoch && w.epoch_b == c.epoch;
}
// Word i of `from`'s lane, given its first look at it.
__device__ inline PeerWord wait_word(const PeerView& v, Channel& c, int from, int i, PeerWord w) {
  if (has_come(c, w) || !c.alive) return w;
  const PeerWord* p = quick_lane(v, c, from) + i;
  Wait wait(v, c, from);
  do {
    w = load_word(p);
  } while (!has_come(c, w) && wait.again());
  wait.done();
  return w;
}
__device__ inline PeerWord wait_word(const PeerView& v, Channel& c, int from, int i) {
  return wait_word(v, c, from, i, load_word(quick_lane(v, c, from) + i));
}
// ((word of rank 0 + word of rank 1) + ...), `a` and `b` being this rank's own: the same bits on every rank.
__device__ inline void sum_word(const PeerView& v, Channel& c, int i, float& a, float& b) {
  constexpr int kGroup = 8;  // looks at several lanes at once: each look is a trip to memory
  float sum_a = 0, sum_b = 0;
  for (int first = 0; first < v.layout.size; first += kGroup) {
    PeerWord w[kGroup];
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const int from = first + k;
      if (from < v.layout.size && from != v.rank) w[k] = load_word(quick_lane(v, c, from) + i);
    }
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const int from = first + k;
      if (from >= v.layout.size) continue;
      if (from == v.rank) {
        w[k].a = a;
        w[k].b = b;
      } else {
        w[k] = wait_word(v, c, from, i, w[k]);
      }
      // Not 0 + x: that would lose the sign of a sum of negative zeros.
      sum_a = from == 0 ? w[k].a : sum_a + w[k].a;
      sum_b = from == 0 ? w[k].b : sum_b + w[k].b;
    }
  }
  a = sum_a;
  b = sum_b;
}

// ---- bulk -------------------------------------------------------------------------------------------------------------
// This rank's lane in `to`'s window: the whole block writes it, then raises the flags.
__device__ inline float* bulk_out(const PeerView& v, const Channel& c, int to) {
  return reinterpret_cast<float*>(v.window[to] + v.layout.bulk(c.epoch & 1, v.rank, c.index));
}
// `from`'s lane in this rank's window, once wait_flags() has returned. Read it past L1: __ldcg.
__device__ inline const float* bulk_in(const PeerView& v, const Channel& c, int from) {
  return reinterpret_cast<const float*>(v.window[v.rank] +
                                        v.layout.bulk(c.epoch & 1, from, c.index));
}
// Every thread of the block, at least as many as there are ranks. What the block has written to the others is there
// when they see its flag.
__device__ inline void raise_flags(const PeerView& v, const Channel& c) {
  __syncthreads();
  const int to = static_cast<int>(threadIdx.x);
  if (to >= v.layout.size || to == v.rank || !c.alive) return;
  __threadfence_system();
  store_release(reinterpret_cast<std::uint32_t*>(v.window[to] +
                                                 v.layout.bulk_flag(c.epoch & 1, v.rank, c.index)),
                c.epoch);
}
// Every thread of the block; returns when all ranks' flags are up, or this rank is dead.
__device__ inline void wait_flags(const PeerView& v, Channel& c) {
  const int from = static_cast<int>(threadIdx.x);
  if (from < v.layout.size && from != v.rank && c.alive) {
    const auto* flag = reinterpret_cast<const std::uint32_t*>(
        v.window[v.rank] + v.layout.bulk_flag(c.epoch & 1, from, c.index));
    Wait wait(v, c, from);
    while (load_acquire(flag) != c.epoch && wait.again()) {
    }
    wait.done();
  }
  c.alive = __syncthreads_and(c.alive) != 0;
}

}  // namespace k3::peer

#endif
