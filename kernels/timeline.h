// Where a device's time goes: marks on its stream. From one mark to the next is a span, under the first one's name.
#pragma once

#include <cstddef>
#include <vector>

namespace k3 {

struct TimeSpan {
  const char* name = "";
  int layer = -1;      // -1: of no layer
  double begin_s = 0;  // since the first span's begin
  double seconds = 0;
};

// Spans follow each other without gaps, but for those that stop() leaves. Names are kept by pointer: literals. Not for use
// inside Backend::capture().
class Timeline {
 public:
  virtual ~Timeline() = default;
  void mark(const char* name, int layer) { add(name, layer); }
  // Ends the last span without beginning another.
  void stop() { add(nullptr, -1); }
  // All spans so far, which are forgotten then. Waits for the device.
  std::vector<TimeSpan> take() {
    const std::vector<double> at = seconds(marks_.size());
    std::vector<TimeSpan> out;
    for (std::size_t i = 0; i + 1 < marks_.size(); ++i) {
      if (marks_[i].name == nullptr) continue;
      out.push_back({marks_[i].name, marks_[i].layer, at[i], at[i + 1] - at[i]});
    }
    marks_.clear();
    return out;
  }

 protected:
  // Mark number i of this take() is made now.
  virtual void stamp(std::size_t i, const char* name) = 0;
  // Of marks 0 .. n - 1, since mark 0.
  virtual std::vector<double> seconds(std::size_t n) = 0;

 private:
  struct Mark {
    const char* name;
    int layer;
  };
  void add(const char* name, int layer) {
    stamp(marks_.size(), name);
    marks_.push_back({name, layer});
  }
  std::vector<Mark> marks_;
};

}  // namespace k3
