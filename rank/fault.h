// From an exception to what a person and the shell get: one line and an exit code.
#pragma once

#include <exception>
#include <functional>
#include <stdexcept>

#include "comm/comm.h"

namespace k3 {

// Work ended on request (a signal, a time limit of the scheduler) between two steps.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int kExitOk = 0;
inline constexpr int kExitInternal = 1;
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitEnvironment = 3;
inline constexpr int kExitDevice = 4;
inline constexpr int kExitInterrupted = 5;

// invalid_argument: bad input; system_error, bad_alloc: environment; DeviceError: device; Interrupted; AgreedFault: the
// fault it carries; all else: internal. The line never holds a line break.
Fault fault_of(const std::exception_ptr& error);

// Collective: runs `work` on this rank, then agrees. All ranks go on, or all throw AgreedFault with the lowest failing
// rank's fault. `work` may speak to other ranks only before anything in it can fail: else they would wait for it. A CommError in it
// is thrown on: the ranks cannot agree any more.
void together(Comm& comm, const std::function<void()>& work);

// The same for work that takes long and gives signs of life (Comm::pulse): the ranks that have done theirs wait for the
// others as long as those move.
void together_at_length(Comm& comm, const std::function<void()>& work);

}  // namespace k3
