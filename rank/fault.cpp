#include "rank/fault.h"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <system_error>

#include "kernels/backend.h"

namespace k3 {
namespace {

Fault spoken(int exit_code, std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  return {exit_code, std::move(line)};
}

}  // namespace

Fault fault_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const AgreedFault& e) {
    return e.fault();
  } catch (const Interrupted& e) {
    return spoken(kExitInterrupted, e.what());
  } catch (const std::invalid_argument& e) {
    return spoken(kExitBadInput, e.what());
  } catch (const std::system_error& e) {
    return spoken(kExitEnvironment, e.what());
  } catch (const std::bad_alloc&) {
    return spoken(kExitEnvironment, "out of memory");
  } catch (const DeviceError& e) {
    return spoken(kExitDevice, e.what());
  } catch (const std::exception& e) {
    return spoken(kExitInternal, e.what());
  } catch (...) {
    return spoken(kExitInternal, "unknown error");
  }
}

namespace {

std::optional<Fault> fault_in(const std::function<void()>& work) {
  try {
    work();
  } catch (const CommError&) {
    throw;
  } catch (...) {
    return fault_of(std::current_exception());
  }
  return std::nullopt;
}

}  // namespace

void together(Comm& comm, const std::function<void()>& work) { comm.agree(fault_in(work)); }

void together_at_length(Comm& comm, const std::function<void()>& work) {
  const std::optional<Fault> fault = fault_in(work);
  comm.finish_pulses();
  comm.agree(fault);
}

}  // namespace k3
