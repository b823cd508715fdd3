#include "comm/peer_kernels.h"

#include <algorithm>
#include <climits>

namespace k3::peer {
namespace {

constexpr int kQuickThreads = 256;
constexpr int kBulkThreads = 512;
constexpr std::uint32_t kAtOnce =
    4;  // reads of a thread under way together: each is a trip to memory
constexpr std::size_t kQuickBytes = std::size_t{512} << 10;  // that one rank sends, plain

// Contiguous floats by the whole block. Reads go past L1, whose lines may be older than what a peer wrote.
__device__ void copy(float* to, const float* from, std::uint32_t n) {
  std::uint32_t done = 0;
  if (((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) & 15) == 0) {
    for (std::uint32_t i = threadIdx.x; i < n / 4; i += kAtOnce * blockDim.x) {
      float4 x[kAtOnce];
#pragma unroll
      for (std::uint32_t k = 0; k < kAtOnce; ++k) {
        if (i + k * blockDim.x < n / 4)
          x[k] = __ldcg(reinterpret_cast<const float4*>(from) + i + k * blockDim.x);
      }
#pragma unroll
      for (std::uint32_t k = 0; k < kAtOnce; ++k) {
        if (i + k * blockDim.x < n / 4) reinterpret_cast<float4*>(to)[i + k * blockDim.x] = x[k];
      }
    }
    done = n / 4 * 4;
  }
  for (std::uint32_t i = done + threadIdx.x; i < n; i += blockDim.x) to[i] = __ldcg(from + i);
}

// ---- sum --------------------------------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kQuickThreads)
    quick_sum(const __grid_constant__ PeerView v, std::uint64_t call, float* data,
              std::uint32_t count) {
  const std::uint32_t n_word = (count + 1) / 2, per = (n_word + gridDim.x - 1) / gridDim.x;
  const std::uint32_t begin = blockIdx.x * per, n = min(per, n_word - begin);
  Channel c = open(v, call);
  for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const std::uint32_t at = 2 * (begin + i);
    push(v, c, static_cast<int>(i), data[at], at + 1 < count ? data[at + 1] : 0.0f);
  }
  for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const std::uint32_t at = 2 * (begin + i);
    float a = data[at], b = at + 1 < count ? data[at + 1] : 0.0f;
    sum_word(v, c, static_cast<int>(i), a, b);
    data[at] = a;
    if (at + 1 < count) data[at + 1] = b;
  }
  close(v, c);
}

// The ordered sum of slice [0, n): `mine` in place, and to every other rank's lane of the exchange `out`.
template <class T>
__device__ void add_and_share(const PeerView& v, const Channel& in, const Channel& out, float* mine,
                              std::uint32_t begin, std::uint32_t end) {
  const auto plus = [](T a, T b) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return a + b;
    } else {
      return T{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
    }
  };
  for (std::uint32_t i = begin + threadIdx.x; i < end; i += kAtOnce * blockDim.x) {
    T acc[kAtOnce];
    for (int r = 0; r < v.layout.size; ++r) {
      const T* from = reinterpret_cast<const T*>(r == v.rank ? mine : bulk_in(v, in, r));
#pragma unroll
      for (std::uint32_t k = 0; k < kAtOnce; ++k) {
        if (i + k * blockDim.x >= end) continue;
        const T x = __ldcg(from + i + k * blockDim.x);
        acc[k] = r == 0 ? x : plus(acc[k], x);
      }
    }
    for (int r = 0; r < v.layout.size; ++r) {
      if (r != v.rank && !out.alive) continue;
      T* to = reinterpret_cast<T*>(r == v.rank ? mine : bulk_out(v, out, r));
#pragma unroll
      for (std::uint32_t k = 0; k < kAtOnce; ++k) {
        if (i + k * blockDim.x < end) to[i + k * blockDim.x] = acc[k];
      }
    }
  }
}

// Two exchanges a piece: rank r adds slice r of all ranks, then gives it to all. Least traffic.
__global__ void __launch_bounds__(kBulkThreads)
    bulk_sum(const __grid_constant__ PeerView v, std::uint64_t call, float* data,
             std::uint32_t count, std::uint32_t per) {
  const std::uint32_t begin = blockIdx.x * per, end = min(begin + per, count);
  const std::uint32_t size = v.layout.size, rank = v.rank, piece = size * kPeerBulkFloats;
  Channel c = open(v, call);
  for (std::uint32_t at = begin; at < end; at += piece) {
    const std::uint32_t len = min(piece, end - at), slice = ((len + size - 1) / size + 3) / 4 * 4;
    const auto n_of = [&](std::uint32_t r) { return min(slice, len - min(len, r * slice)); };
    if (at != begin) next(c);
    for (std::uint32_t k = 1; k < size && c.alive; ++k) {
      const std::uint32_t to = (rank + k) % size;
      copy(bulk_out(v, c, static_cast<int>(to)), data + at + to * slice, n_of(to));
    }
    raise_flags(v, c);
    wait_flags(v, c);
    Channel shared = c;
    next(shared);
    float* mine = data + at + rank * slice;
    const std::uint32_t n = n_of(rank);
    const std::uint32_t quads = (reinterpret_cast<std::uintptr_t>(mine) & 15) == 0 ? n / 4 : 0;
    add_and_share<float4>(v, c, shared, mine, 0, quads);
    add_and_share<float>(v, c, shared, mine, quads * 4, n);
    c = shared;
    raise_flags(v, c);
    wait_flags(v, c);
    for (std::uint32_t r = 0; r < size; ++r) {
      if (r != rank) copy(data + at + r * slice, bulk_in(v, c, static_cast<int>(r)), n_of(r));
    }
  }
  close(v, c);
}

// ---- gather -----------------------------------------------------------------------------------------------------------
// Words [begin, begin + n) of a rank's band that this block moves. A rank without columns still gets and sends one word that
// nobody keeps: an exchange needs one from all.
struct Range {
  std::uint32_t begin, n;
};
__device__ Range range_of(std::uint32_t elems) {
  const std::uint32_t words = (elems + 1) / 2, per = (words + gridDim.x - 1) / gridDim.x;
  const std::uint32_t begin = min(words, blockIdx.x * per);
  return {begin, min(per, words - begin)};
}

__device__ std::uint32_t elems_of(const GatherShape& s, std::uint32_t r) {
  return s.n_row * s.width[r];
}

// Element i of rank r's [n_row, width] to its place.
__device__ void place(float* all, const GatherShape& s, std::uint32_t r, std::uint32_t i, float x) {
  const std::uint32_t row = s.n_row == 1 ? 0 : i / s.width[r];
  all[static_cast<std::size_t>(row) * s.total + s.begin[r] + (i - row * s.width[r])] = x;
}

// max_words: of the widest rank.
__global__ void __launch_bounds__(kQuickThreads)
    quick_gather(const __grid_constant__ PeerView v, std::uint64_t call, const float* mine,
                 float* all, const __grid_constant__ GatherShape s, std::uint32_t max_words) {
  const std::uint32_t rank = v.rank, elems = elems_of(s, rank);
  const Range own = range_of(elems);
  Channel c = open(v, call);
  for (std::uint32_t i = threadIdx.x; i < max(own.n, 1u); i += blockDim.x) {
    const std::uint32_t at = 2 * (own.begin + i);
    const bool has_a = i < own.n, has_b = has_a && at + 1 < elems;
    const float a = has_a ? mine[at] : 0.0f, b = has_b ? mine[at + 1] : 0.0f;
    push(v, c, static_cast<int>(i), a, b);
    if (has_a) place(all, s, rank, at, a);
    if (has_b) place(all, s, rank, at + 1, b);
  }
  const std::uint32_t lane = max((max_words + gridDim.x - 1) / gridDim.x, 1u);
  for (std::uint32_t j = threadIdx.x; j < v.layout.size * lane; j += blockDim.x) {
    const std::uint32_t r = j / lane, i = j % lane;
    if (r == rank) continue;
    const Range range = range_of(elems_of(s, r));
    if (i >= max(range.n, 1u)) continue;
    const PeerWord w = wait_word(v, c, static_cast<int>(r), static_cast<int>(i));
    const std::uint32_t at = 2 * (range.begin + i);
    if (i < range.n) place(all, s, r, at, w.a);
    if (i < range.n && at + 1 < elems_of(s, r)) place(all, s, r, at + 1, w.b);
  }
  close(v, c);
}

__global__ void __launch_bounds__(kBulkThreads)
    bulk_gather(const __grid_constant__ PeerView v, std::uint64_t call, const float* mine,
                float* all, const __grid_constant__ GatherShape s, std::uint32_t n_round) {
  const std::uint32_t rank = v.rank, size = v.layout.size;
  // Piece `round` of this channel's part of rank r's elements.
  const auto begin_of = [&](std::uint32_t r, std::uint32_t round, std::uint32_t& n) {
    const std::uint32_t elems = elems_of(s, r),
                        per = ((elems + gridDim.x - 1) / gridDim.x + 3) / 4 * 4;
    const std::uint32_t end = min(elems, (blockIdx.x + 1) * per);
    const std::uint32_t begin = min(end, blockIdx.x * per + round * kPeerBulkFloats);
    n = min(end - begin, static_cast<std::uint32_t>(kPeerBulkFloats));
    return begin;
  };
  Channel c = open(v, call);
  for (std::uint32_t round = 0; round < n_round; ++round) {
    if (round > 0) next(c);
    std::uint32_t n = 0;
    const std::uint32_t begin = begin_of(rank, round, n);
    for (std::uint32_t k = 1; k < size && c.alive; ++k)
      copy(bulk_out(v, c, static_cast<int>((rank + k) % size)), mine + begin, n);
    raise_flags(v, c);
    for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x)
      place(all, s, rank, begin + i, mine[begin + i]);
    wait_flags(v, c);
    for (std::uint32_t r = 0; r < size; ++r) {
      if (r == rank) continue;
      const std::uint32_t from = begin_of(r, round, n);
      const float* in = bulk_in(v, c, static_cast<int>(r));
      if (s.n_row == 1) {
        copy(all + s.begin[r] + from, in, n);
      } else {
        for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x)
          place(all, s, r, from + i, __ldcg(in + i));
      }
    }
  }
  close(v, c);
}

// ---- reduce-scatter ----------------------------------------------------------------------------------------------------
// The place of element i of rank r's band.
__device__ float& band_at(float* data, const GatherShape& s, std::uint32_t r, std::uint32_t i) {
  const std::uint32_t row = s.n_row == 1 ? 0 : i / s.width[r];
  return data[static_cast<std::size_t>(row) * s.total + s.begin[r] + (i - row * s.width[r])];
}

__global__ void __launch_bounds__(kQuickThreads)
    quick_sum_bands(const __grid_constant__ PeerView v, std::uint64_t call, float* data,
                    const __grid_constant__ GatherShape s, std::uint32_t max_words) {
  const std::uint32_t rank = v.rank, elems = elems_of(s, rank);
  const std::uint32_t lane = max((max_words + gridDim.x - 1) / gridDim.x, 1u);
  Channel c = open(v, call);
  for (std::uint32_t j = threadIdx.x; j < v.layout.size * lane; j += blockDim.x) {
    const std::uint32_t r = j / lane, i = j % lane;
    if (r == rank) continue;
    const std::uint32_t theirs = elems_of(s, r);
    const Range range = range_of(theirs);
    if (i >= max(range.n, 1u)) continue;
    const std::uint32_t at = 2 * (range.begin + i);
    const bool has_a = i < range.n, has_b = has_a && at + 1 < theirs;
    push_to(v, c, static_cast<int>(r), static_cast<int>(i), has_a ? band_at(data, s, r, at) : 0.0f,
            has_b ? band_at(data, s, r, at + 1) : 0.0f);
  }
  const Range own = range_of(elems);
  for (std::uint32_t i = threadIdx.x; i < max(own.n, 1u); i += blockDim.x) {
    const std::uint32_t at = 2 * (own.begin + i);
    const bool has_a = i < own.n, has_b = has_a && at + 1 < elems;
    float a = has_a ? band_at(data, s, rank, at) : 0.0f,
          b = has_b ? band_at(data, s, rank, at + 1) : 0.0f;
    sum_word(v, c, static_cast<int>(i), a, b);
    if (has_a) band_at(data, s, rank, at) = a;
    if (has_b) band_at(data, s, rank, at + 1) = b;
  }
  close(v, c);
}

// ---- send and receive -------------------------------------------------------------------------------------------------
__device__ Channel mail_channel(const PeerView& v, std::uint64_t call, std::uint32_t last) {
  Channel c;
  c.index = static_cast<int>(blockIdx.x);
  c.call = call;
  c.epoch = last;
  c.alive = *static_cast<volatile std::uint32_t*>(v.dead) == 0;
  return c;
}

__global__ void __launch_bounds__(kBulkThreads)
    mail_send(const __grid_constant__ PeerView v, std::uint64_t call, const float* data,
              std::uint32_t count, std::uint32_t per, int to) {
  std::uint32_t* sent = v.mail_sent + to * kPeerMailChannels + blockIdx.x;
  const std::uint32_t begin = blockIdx.x * per, end = min(begin + per, count);
  Channel c = mail_channel(v, call, *sent);
  const auto* ack =
      reinterpret_cast<const std::uint32_t*>(v.window[v.rank] + v.layout.mail_ack(to, c.index));
  for (std::uint32_t at = begin; at < end; at += kPeerMailFloats) {
    ++c.epoch;
    if (threadIdx.x == 0 && c.alive) {
      // Two slots: what lay in this one must have been read.
      Wait wait(v, c, to);
      while (static_cast<std::int32_t>(load_acquire(ack) - (c.epoch - 2)) < 0 && wait.again()) {
      }
      wait.done();
    }
    c.alive = __syncthreads_and(c.alive) != 0;
    if (!c.alive) break;
    std::byte* theirs = v.window[to];
    copy(reinterpret_cast<float*>(theirs + v.layout.mail(c.epoch & 1, v.rank, c.index)), data + at,
         min(end - at, static_cast<std::uint32_t>(kPeerMailFloats)));
    __syncthreads();
    if (threadIdx.x != 0) continue;
    __threadfence_system();
    store_release(
        reinterpret_cast<std::uint32_t*>(theirs + v.layout.mail_flag(c.epoch & 1, v.rank, c.index)),
        c.epoch);
  }
  if (threadIdx.x == 0) *sent = c.epoch;
}

__global__ void __launch_bounds__(kBulkThreads)
    mail_recv(const __grid_constant__ PeerView v, std::uint64_t call, float* data,
              std::uint32_t count, std::uint32_t per, int from) {
  std::uint32_t* got = v.mail_got + from * kPeerMailChannels + blockIdx.x;
  const std::uint32_t begin = blockIdx.x * per, end = min(begin + per, count);
  Channel c = mail_channel(v, call, *got);
  auto* ack = reinterpret_cast<std::uint32_t*>(v.window[from] + v.layout.mail_ack(v.rank, c.index));
  for (std::uint32_t at = begin; at < end; at += kPeerMailFloats) {
    ++c.epoch;
    if (threadIdx.x == 0 && c.alive) {
      const auto* flag = reinterpret_cast<const std::uint32_t*>(
          v.window[v.rank] + v.layout.mail_flag(c.epoch & 1, from, c.index));
      Wait wait(v, c, from);
      while (load_acquire(flag) != c.epoch && wait.again()) {
      }
      wait.done();
    }
    c.alive = __syncthreads_and(c.alive) != 0;
    if (!c.alive) break;
    copy(data + at,
         reinterpret_cast<const float*>(v.window[v.rank] +
                                        v.layout.mail(c.epoch & 1, from, c.index)),
         min(end - at, static_cast<std::uint32_t>(kPeerMailFloats)));
    __syncthreads();
    if (threadIdx.x == 0) store_release(ack, c.epoch);
  }
  if (threadIdx.x == 0) *got = c.epoch;
}

// Floats of a channel: at most `channels` of them, none empty, each worth a block.
struct Cut {
  std::uint32_t per, n_block;
};
Cut cut(std::size_t count, std::size_t channels) {
  constexpr std::size_t kLeast = 1024;
  const std::size_t per = std::max(kLeast, ((count + channels - 1) / channels + 3) / 4 * 4);
  return {static_cast<std::uint32_t>(per), static_cast<std::uint32_t>((count + per - 1) / per)};
}

std::uint32_t quick_blocks(std::size_t words) {
  return static_cast<std::uint32_t>(
      std::clamp<std::size_t>((words + kQuickThreads - 1) / kQuickThreads, 1, kPeerChannels));
}

}  // namespace

bool is_quick(std::size_t bytes, int size) {
  constexpr std::size_t kLanes = std::size_t{kPeerChannels} * kPeerQuickWords * 2 * sizeof(float);
  return bytes <= kLanes && bytes * static_cast<std::size_t>(size - 1) <= kQuickBytes;
}

cudaError_t sum(const PeerView& v, std::uint64_t call, float* data, std::size_t count,
                cudaStream_t stream) {
  if (is_quick(count * sizeof(float), v.layout.size)) {
    quick_sum<<<quick_blocks((count + 1) / 2), kQuickThreads, 0, stream>>>(
        v, call, data, static_cast<std::uint32_t>(count));
  } else {
    const Cut c = cut(count, kPeerChannels);
    bulk_sum<<<c.n_block, kBulkThreads, 0, stream>>>(v, call, data,
                                                     static_cast<std::uint32_t>(count), c.per);
  }
  return cudaGetLastError();
}

// Floats of the widest band.
static std::size_t widest_band(const GatherShape& s, int size) {
  return *std::max_element(s.width, s.width + size) * std::size_t{s.n_row};
}

bool fits_quick(const GatherShape& s, int size) {
  return is_quick(widest_band(s, size) * sizeof(float), size);
}

cudaError_t sum_bands(const PeerView& v, std::uint64_t call, float* data, const GatherShape& s,
                      cudaStream_t stream) {
  const std::size_t words = (widest_band(s, v.layout.size) + 1) / 2;
  quick_sum_bands<<<quick_blocks(words * static_cast<std::size_t>(v.layout.size)), kQuickThreads, 0,
                    stream>>>(v, call, data, s, static_cast<std::uint32_t>(words));
  return cudaGetLastError();
}

cudaError_t gather(const PeerView& v, std::uint64_t call, const float* mine, float* all,
                   const GatherShape& s, cudaStream_t stream) {
  const std::size_t widest = widest_band(s, v.layout.size);
  if (is_quick(widest * sizeof(float), v.layout.size)) {
    const std::size_t words = (widest + 1) / 2;
    quick_gather<<<quick_blocks(words * static_cast<std::size_t>(v.layout.size)), kQuickThreads, 0,
                   stream>>>(v, call, mine, all, s, static_cast<std::uint32_t>(words));
  } else {
    const Cut c = cut(widest, kPeerChannels);
    const std::size_t most = ((widest + c.n_block - 1) / c.n_block + 3) / 4 * 4;
    bulk_gather<<<c.n_block, kBulkThreads, 0, stream>>>(
        v, call, mine, all, s,
        static_cast<std::uint32_t>((most + kPeerBulkFloats - 1) / kPeerBulkFloats));
  }
  return cudaGetLastError();
}

cudaError_t send(const PeerView& v, std::uint64_t call, const float* data, std::size_t count,
                 int to, cudaStream_t stream) {
  const Cut c = cut(count, kPeerMailChannels);
  mail_send<<<c.n_block, kBulkThreads, 0, stream>>>(v, call, data,
                                                    static_cast<std::uint32_t>(count), c.per, to);
  return cudaGetLastError();
}

cudaError_t recv(const PeerView& v, std::uint64_t call, float* data, std::size_t count, int from,
                 cudaStream_t stream) {
  const Cut c = cut(count, kPeerMailChannels);
  mail_recv<<<c.n_block, kBulkThreads, 0, stream>>>(v, call, data,
                                                    static_cast<std::uint32_t>(count), c.per, from);
  return cudaGetLastError();
}

cudaError_t load_kernels() {
  const void* kernels[] = {
      reinterpret_cast<const void*>(quick_sum),       reinterpret_cast<const void*>(bulk_sum),
      reinterpret_cast<const void*>(quick_gather),    reinterpret_cast<const void*>(bulk_gather),
      reinterpret_cast<const void*>(quick_sum_bands), reinterpret_cast<const void*>(mail_send),
      reinterpret_cast<const void*>(mail_recv)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes{};
    if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
        status != cudaSuccess)
      return status;
  }
  return cudaSuccess;
}

}  // namespace k3::peer
