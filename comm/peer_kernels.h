// The data calls of PeerComm as kernels on a stream; what they do is told in peer_view.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "comm/peer_view.h"

namespace k3::peer {

// Columns in bands: rank r's columns are [begin[r], begin[r] + width[r]).
struct GatherShape {
  std::uint32_t n_row = 0;
  std::uint32_t total = 0;
  std::uint32_t width[kPeerMax] = {};
  std::uint32_t begin[kPeerMax] = {};
};

// True where a message goes as quick words: they take one trip, but twice the bytes.
bool is_quick(std::size_t bytes, int size);

// All return what the launch returned. Counts are floats and at least 1, sizes at least 2; `call` is what a wait without end
// is told by. data: in place. n_row * total and every count in 32 bits.
cudaError_t sum(const PeerView& v, std::uint64_t call, float* data, std::size_t count,
                cudaStream_t stream);
cudaError_t gather(const PeerView& v, std::uint64_t call, const float* mine, float* all,
                   const GatherShape& shape, cudaStream_t stream);
// data[n_row, total], in place: afterwards this rank's columns hold the sum over ranks, the others what they held. Only where
// fits_quick().
cudaError_t sum_bands(const PeerView& v, std::uint64_t call, float* data, const GatherShape& shape,
                      cudaStream_t stream);
bool fits_quick(const GatherShape& shape, int size);
cudaError_t send(const PeerView& v, std::uint64_t call, const float* data, std::size_t count,
                 int to, cudaStream_t stream);
cudaError_t recv(const PeerView& v, std::uint64_t call, float* data, std::size_t count, int from,
                 cudaStream_t stream);

// Loads the kernels' code: a first launch must not have to wait for the device, where kernels may be waiting for a peer.
cudaError_t load_kernels();

}  // namespace k3::peer
