// Timeline by device events.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "kernels/timeline.h"

namespace k3::cuda {

// Marks are made on `stream`, which must outlive the timeline.
std::unique_ptr<Timeline> make_timeline(cudaStream_t stream);

}  // namespace k3::cuda
