// A world of which one rank, or two, are there: for measuring a rank's own time in a layout that needs more devices than
// there are. The numbers that come out mean nothing; the work, and with two ranks what they say to each other, is that of
// the whole world.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "kernels/backend.h"

namespace k3 {

// Ranks [first, first + present.size()) of `world` ranks, one tensor-parallel group.
//
// Data calls: those that are there speak for real, where they are more than one. What the absent would have brought is
// stood in for by copies on the device: a sum of one rank moves its data once; a gather fills the absent ranks' columns
// with the caller's own, so that what is computed from them stays of sane size. Control calls go to those that are there,
// and return their answers alone.
class PartialComm final : public Comm {
 public:
  // `present` and `backend` outlive this object and what is split from it. Throws std::invalid_argument for ranks outside
  // the world.
  PartialComm(Comm& present, int first, int world, Backend& backend);

  int rank() const override { return first_ + present_->rank(); }
  int size() const override { return world_; }

  void sum(Point point, float* data, std::size_t count, StreamHandle stream) override;
  void gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                   std::span<const std::size_t> widths, StreamHandle stream) override;
  // There is one stage: std::logic_error.
  void send(Point, const float*, std::size_t, int, StreamHandle) override;
  void recv(Point, float*, std::size_t, int, StreamHandle) override;

  void broadcast(Point point, std::span<std::byte> data, int root) override;
  std::vector<std::vector<std::byte>> gather_bytes(Point point, std::span<const std::byte> mine,
                                                   int root) override;
  std::vector<std::vector<std::byte>> all_gather_bytes(Point point,
                                                       std::span<const std::byte> mine) override;
  void agree(const std::optional<Fault>& fault) override { present_->agree(fault); }
  void barrier(Point point) override { present_->barrier(point); }
  bool capturable() const override { return present_->size() == 1 || present_->capturable(); }
  void pulse(std::uint64_t done, std::uint64_t total) override { present_->pulse(done, total); }
  void finish_pulses() override { present_->finish_pulses(); }
  void replayed(StreamHandle stream) override {
    if (present_->size() > 1) present_->replayed(stream);
  }
  // The same ranks of the same world, whatever the colour: there is one group.
  std::unique_ptr<Comm> split(int colour, int key) override;

 private:
  void count(Point point, std::size_t n_float);
  int present_root(int root) const;
  void stand_in(const float* data, std::size_t count);
  void fill(const float* mine, float* all, std::int64_t n_row, std::span<const std::size_t> widths);

  std::unique_ptr<Comm> owned_;
  Comm* present_;
  int first_;
  int world_;
  Backend& backend_;
  std::unique_ptr<DeviceBuffer> scratch_;
};

}  // namespace k3
