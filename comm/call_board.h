// What this rank waits for, so that another thread can say it while the rank itself is stuck: on SIGTERM, for instance.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/points.h"

namespace k3 {

// Where in its own work a rank makes a call, as its caller names it: {"layer", 12}. comm only repeats it.
struct Place {
  const char* what = nullptr;
  int number = 0;
};

// "sum(AttnOut) call 12, layer 3"
std::string call_name(const char* op, Point point, std::uint64_t number, Place place);

// A call that has begun and not ended.
struct OpenCall {
  std::string name;  // call_name(), perhaps with whom it waits for
  double seconds = 0;
};

// All members may be called from any thread.
class CallBoard {
 public:
  // The host is inside a call. One at a time.
  void begin(const char* op, Point point, std::uint64_t number, Place place);
  void end();

  // Calls that the device works on while the host does something else: `ask` says which one is under way. Returns what
  // remove() takes.
  using Ask = std::function<std::optional<OpenCall>()>;
  int add(Ask ask);
  void remove(int id);

  // The device's call where there is one, else the host's.
  std::optional<OpenCall> open_call() const;

  // What this rank computes on, for error lines ("cuda 0"); empty: a CPU.
  void set_device(std::string name);
  std::string device() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct HostCall {
    const char* op = nullptr;
    Point point = Point::kCount;
    std::uint64_t number = 0;
    Place place;
    Clock::time_point since;
  };

  mutable std::mutex mutex_;
  HostCall host_;
  std::string device_;
  int next_id_ = 0;
  std::vector<std::pair<int, Ask>> asks_;
};

}  // namespace k3
