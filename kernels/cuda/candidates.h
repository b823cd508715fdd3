// Candidates of a vocabulary band, searched on the device (candidates.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/backend.h"

namespace k3::cuda {

inline constexpr int kMaxDeviceCandidates = 256;  // more are searched for on the host

struct CandidateSlice {
  float top;
  std::int32_t bad;  // a NaN or +infinity among the logits
  double sum_exp, sum_exp_scaled;
};
struct CandidateHeader {
  std::int32_t n;
  std::int32_t bad;
  float top;
  std::int32_t unused;
  double sum_exp, sum_exp_scaled;
};

// Memory of a search: the answer, where the host reads it, and the device's own. `arrived` is zero before the first.
struct CandidateScratch {
  CandidateHeader* header;
  Candidate* best;  // right behind the header
  unsigned* arrived;
  CandidateSlice* slice;
  std::byte* found;
};
std::size_t candidate_scratch_bytes();
std::size_t candidate_answer_bytes();
CandidateScratch lay_out_candidates(std::byte* memory, std::byte* answer);

// Queues the search of logits[0 .. n); header and best hold the answer afterwards. False, and nothing done, where the
// query asks for too many.
bool search_candidates_on_device(const float* logits, std::int64_t n, std::int64_t vocab_begin,
                                 const CandidateQuery& q, const CandidateScratch& scratch,
                                 cudaStream_t stream);
// The answer as Backend::candidates gives it; header and best in host memory.
CandidateResult candidates_from(const CandidateHeader& header, const Candidate* best);

}  // namespace k3::cuda
