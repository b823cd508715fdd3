// Every backend that this build and this machine have, so that one test runs each case on all of them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/backend.h"
#include "kernels/cuda_devices.h"

namespace k3 {

struct BackendUnderTest {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
};

inline std::vector<BackendUnderTest> backends_under_test() {
  std::vector<BackendUnderTest> all{{"cpu, 1 thread", [] { return make_cpu_backend(1); }},
                                    {"cpu, 3 threads", [] { return make_cpu_backend(3); }}};
  if (!cuda_devices().empty()) all.push_back({"cuda", [] { return make_cuda_backend(0); }});
  return all;
}

inline void for_each_backend(const std::function<void(Backend&)>& body) {
  for (const BackendUnderTest& b : backends_under_test()) {
    CAPTURE(b.name);
    body(*b.make());
  }
}

// A row-major matrix on the device with a host copy; owns its memory.
template <class T>
class Matrix {
 public:
  Matrix(Backend& backend, std::int64_t rows, std::int64_t cols, std::vector<T> values = {})
      : backend_(&backend),
        buffer_(backend.allocate(static_cast<std::size_t>(rows * cols) * sizeof(T))),
        rows_(rows),
        cols_(cols) {
    if (!values.empty()) set(values);
  }
  View<T> view() const { return {reinterpret_cast<T*>(buffer_->data()), rows_, cols_}; }
  operator View<T>() const { return view(); }
  operator View<const T>() const { return view(); }
  T* data() const { return view().data; }
  void set(const std::vector<T>& values) {
    backend_->upload(buffer_->data(), values.data(), values.size() * sizeof(T));
  }
  std::vector<T> get() const {
    std::vector<T> out(static_cast<std::size_t>(rows_ * cols_));
    backend_->download(out.data(), buffer_->data(), out.size() * sizeof(T));
    return out;
  }

 private:
  Backend* backend_;
  std::unique_ptr<DeviceBuffer> buffer_;
  std::int64_t rows_, cols_;
};

}  // namespace k3
