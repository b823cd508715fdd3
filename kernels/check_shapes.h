// Checks on arguments that every backend makes alike.
#pragma once

#include "kernels/backend.h"

namespace k3 {

// Throws std::invalid_argument naming both shapes when job.y = job.x . job.w^T does not fit.
void check_shapes(const MatmulJob& job);

}  // namespace k3
