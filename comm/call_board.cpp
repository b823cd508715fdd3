#include "comm/call_board.h"

#include <algorithm>

namespace k3 {

std::string call_name(const char* op, Point point, std::uint64_t number, Place place) {
  std::string name = std::string(op) + "(" + point_name(point) + ") call " + std::to_string(number);
  if (place.what != nullptr)
    name += std::string(", ") + place.what + " " + std::to_string(place.number);
  return name;
}

void CallBoard::begin(const char* op, Point point, std::uint64_t number, Place place) {
  const std::scoped_lock lock(mutex_);
  host_ = {op, point, number, place, Clock::now()};
}

void CallBoard::end() {
  const std::scoped_lock lock(mutex_);
  host_.op = nullptr;
}

int CallBoard::add(Ask ask) {
  const std::scoped_lock lock(mutex_);
  asks_.emplace_back(next_id_, std::move(ask));
  return next_id_++;
}

void CallBoard::remove(int id) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(asks_, [&](const auto& a) { return a.first == id; });
}

std::optional<OpenCall> CallBoard::open_call() const {
  const std::scoped_lock lock(mutex_);
  for (const auto& [id, ask] : asks_) {
    if (std::optional<OpenCall> call = ask()) return call;
  }
  if (host_.op == nullptr) return std::nullopt;
  return OpenCall{call_name(host_.op, host_.point, host_.number, host_.place),
                  std::chrono::duration<double>(Clock::now() - host_.since).count()};
}

void CallBoard::set_device(std::string name) {
  const std::scoped_lock lock(mutex_);
  device_ = std::move(name);
}

std::string CallBoard::device() const {
  const std::scoped_lock lock(mutex_);
  return device_;
}

}  // namespace k3
