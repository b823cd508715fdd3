#include "comm/thread_comm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "comm/call.h"
#include "comm/ordered_sum.h"

namespace k3 {
namespace {

struct Group;

// Thrown at ranks that were waiting when another failed: an effect, never the cause that run_ranks
// reports.
class Released : public CommError {
 public:
  using CommError::CommError;
};

// All ranks of one world, and every group they made.
struct Universe {
  explicit Universe(int world) : gone(world) {}

  std::atomic<int> failed{-1};          // a rank that failed
  std::vector<std::atomic<bool>> gone;  // ranks that have returned
  std::mutex mutex;
  std::vector<std::weak_ptr<Group>> groups;

  void fail(int world_rank);
  void leave(int world_rank);
  void wake_all();
};

// What a rank shows to the others of its group during one call.
struct Slot {
  const char* op = "";
  Point point = Point::kCount;
  const void* data = nullptr;
  std::size_t bytes = 0;
  const std::optional<Fault>* fault = nullptr;
  int colour = 0;
  int key = 0;
  std::shared_ptr<Group> made;
};

// A send() that waits for its recv().
struct Letter {
  const float* data = nullptr;
  std::size_t count = 0;
  Point point = Point::kCount;
  bool posted = false;
  bool taken = false;
};

struct Group {
  std::shared_ptr<Universe> universe;
  std::vector<int> world_rank;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t generation = 0;  // how often all ranks have met
  int arrived = 0;
  std::vector<Slot> slots;
  std::vector<Letter> letters;  // [from * size + to]

  int size() const { return static_cast<int>(world_rank.size()); }
};

void Universe::wake_all() {
  const std::lock_guard lock(mutex);
  for (const std::weak_ptr<Group>& weak : groups) {
    const std::shared_ptr<Group> group = weak.lock();
    if (!group) continue;
    // A rank between its test of the condition and its wait holds the mutex, so it cannot miss
    // this.
    { const std::lock_guard group_lock(group->mutex); }
    group->changed.notify_all();
  }
}

void Universe::fail(int world_rank) {
  int none = -1;
  failed.compare_exchange_strong(none, world_rank);
  wake_all();
}

void Universe::leave(int world_rank) {
  gone[world_rank] = true;
  wake_all();
}

std::shared_ptr<Group> make_group(const std::shared_ptr<Universe>& universe,
                                  std::vector<int> world_rank) {
  auto group = std::make_shared<Group>();
  group->universe = universe;
  group->world_rank = std::move(world_rank);
  group->slots.resize(group->world_rank.size());
  group->letters.resize(group->world_rank.size() * group->world_rank.size());
  const std::lock_guard lock(universe->mutex);
  universe->groups.push_back(group);
  return group;
}

class ThreadComm : public Comm {
 public:
  ThreadComm(std::shared_ptr<Group> group, int rank, std::shared_ptr<double> time_limit_s)
      : group_(std::move(group)), rank_(rank), size_(group_->size()) {
    time_limit_s_ = std::move(time_limit_s);
    parts_.resize(size_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Universe& universe() { return *group_->universe; }

  void sum(Point point, float* data, std::size_t count, StreamHandle stream) override;
  void gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                   std::span<const std::size_t> widths, StreamHandle stream) override;
  void send(Point point, const float* data, std::size_t count, int to,
            StreamHandle stream) override;
  void recv(Point point, float* data, std::size_t count, int from, StreamHandle stream) override;
  void broadcast(Point point, std::span<std::byte> data, int root) override;
  std::vector<std::vector<std::byte>> gather_bytes(Point point, std::span<const std::byte> mine,
                                                   int root) override;
  std::vector<std::vector<std::byte>> all_gather_bytes(Point point,
                                                       std::span<const std::byte> mine) override;
  void agree(const std::optional<Fault>& fault) override;
  void barrier(Point point) override;
  std::unique_ptr<Comm> split(int colour, int key) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  int world_rank(int rank) const override { return group_->world_rank[rank]; }
  const Slot& slot(int rank) const { return group_->slots[rank]; }
  std::string line(const Call& call, const std::string& text) const;
  [[noreturn]] void fail(const Call& call, const std::string& text);
  void check_rank(const char* what, int rank) const;

  // Returns when ready() holds. Throws when it never will: `needed` (or, at -1, any rank of the
  // group) has gone, some rank has failed, or the time limit is over.
  template <class Ready>
  void wait(Lock& lock, const Call& call, int needed, Ready ready);
  bool has_gone(int needed) const;
  [[noreturn]] void give_up(const Call& call) const;
  // Shows `mine` to all and returns when every rank has shown its own. From then until part()
  // returns, slots and the memory they point to stay as they are, so nothing in between may throw:
  // `problem` waits for part().
  void meet(const Call& call, Slot mine);
  // Returns when every rank has read what it needs. Nothing releases it: all ranks are on their way
  // here.
  void part(const Call& call, const std::string& problem = {});
  std::string size_problem(int other, std::size_t found, std::size_t expected) const;

  std::shared_ptr<Group> group_;
  int rank_;
  int size_;
  std::vector<const float*> parts_;
};

std::string ThreadComm::line(const Call& call, const std::string& text) const {
  return "rank " + std::to_string(world_rank(rank_)) + "/" +
         std::to_string(group_->universe->gone.size()) + ": " + call.name() + ": " + text;
}

void ThreadComm::fail(const Call& call, const std::string& text) {
  universe().fail(world_rank(rank_));
  throw CommError(line(call, text));
}

void ThreadComm::check_rank(const char* what, int rank) const {
  if (rank >= 0 && rank < size_) return;
  throw std::logic_error(std::string(what) + ": no rank " + std::to_string(rank) +
                         " in a group of " + std::to_string(size_));
}

bool ThreadComm::has_gone(int needed) const {
  const std::vector<std::atomic<bool>>& gone = group_->universe->gone;
  if (needed >= 0) return gone[world_rank(needed)];
  return std::any_of(group_->world_rank.begin(), group_->world_rank.end(),
                     [&](int r) { return gone[r].load(); });
}

void ThreadComm::give_up(const Call& call) const {
  const std::string culprit = std::to_string(group_->universe->failed);
  throw Released(line(call, "given up because rank " + culprit + " failed"));
}

template <class Ready>
void ThreadComm::wait(Lock& lock, const Call& call, int needed, Ready ready) {
  std::atomic<int>& failed = universe().failed;
  const auto over = [&] { return ready() || failed >= 0 || has_gone(needed); };
  const double limit_s = call.point() == Point::kStep ? 0 : time_limit();
  if (limit_s <= 0) {
    group_->changed.wait(lock, over);
  } else {
    group_->changed.wait_for(lock, std::chrono::duration<double>(limit_s), over);
  }
  if (ready()) return;
  if (failed >= 0) give_up(call);
  const bool gone = has_gone(needed);
  // Under the lock: a rank that comes later must not take the present call for complete and read
  // what we leave behind.
  int none = -1;
  failed.compare_exchange_strong(none, world_rank(rank_));
  lock.unlock();
  if (gone) fail(call, "waits for a rank that has returned");
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "waited %.3g s", call.seconds());
  fail(call, text.data());
}

void ThreadComm::meet(const Call& call, Slot mine) {
  mine.op = call.op();
  mine.point = call.point();
  {
    Lock lock(group_->mutex);
    if (universe().failed >= 0) give_up(call);
    group_->slots[rank_] = mine;
    const std::uint64_t generation = group_->generation;
    if (++group_->arrived == size_) {
      group_->arrived = 0;
      ++group_->generation;
      group_->changed.notify_all();
    } else {
      wait(lock, call, -1, [&] { return group_->generation != generation; });
    }
  }
  // Every rank compares with every other, so all see a difference and none goes on to read.
  for (int r = 0; r < size_; ++r) {
    if (std::strcmp(slot(r).op, mine.op) == 0 && slot(r).point == mine.point) continue;
    fail(call, "but rank " + std::to_string(world_rank(r)) + " is in " + slot(r).op + "(" +
                   point_name(slot(r).point) + ")");
  }
}

void ThreadComm::part(const Call& call, const std::string& problem) {
  {
    Lock lock(group_->mutex);
    const std::uint64_t generation = group_->generation;
    if (++group_->arrived == size_) {
      group_->arrived = 0;
      ++group_->generation;
      group_->changed.notify_all();
    } else {
      group_->changed.wait(lock, [&] { return group_->generation != generation; });
    }
  }
  if (!problem.empty()) fail(call, problem);
}

std::string ThreadComm::size_problem(int other, std::size_t found, std::size_t expected) const {
  if (found == expected) return {};
  return "rank " + std::to_string(world_rank(other)) + " has " + std::to_string(found) + " bytes" +
         ", expected " + std::to_string(expected);
}

void ThreadComm::sum(Point point, float* data, std::size_t count, StreamHandle) {
  if (size_ == 1) return;
  const Call call("sum", point, stats_of(point), count * sizeof(float));
  Slot mine;
  mine.data = data;
  mine.bytes = count * sizeof(float);
  meet(call, mine);
  std::string problem;
  for (int r = 0; r < size_; ++r) {
    parts_[r] = static_cast<const float*>(slot(r).data);
    if (problem.empty()) problem = size_problem(r, slot(r).bytes, mine.bytes);
  }
  // Rank r adds slice r for everyone: nobody else reads or writes it between the two meetings.
  // Sizes that differ are seen by every rank, so none adds.
  const std::size_t end = problem.empty() ? count * (rank_ + 1) / size_ : 0;
  std::array<float, 1024> result;
  for (std::size_t at = count * rank_ / size_; at < end; at += result.size()) {
    const std::size_t n = std::min(result.size(), end - at);
    ordered_sum(parts_, at, n, result.data());
    for (const float* part : parts_) std::copy_n(result.data(), n, const_cast<float*>(part) + at);
  }
  part(call, problem);
}

void ThreadComm::gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                             std::span<const std::size_t> widths, StreamHandle) {
  if (widths.size() != static_cast<std::size_t>(size_)) {
    throw std::logic_error("gather_rows: " + std::to_string(widths.size()) +
                           " widths for a group of " + std::to_string(size_));
  }
  const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
  const Call call("gather_rows", point, stats_of(point), n_row * total * sizeof(float));
  Slot shown;
  shown.data = mine;
  shown.bytes = n_row * widths[rank_] * sizeof(float);
  meet(call, shown);
  std::string problem;
  std::size_t column = 0;
  for (int r = 0; r < size_ && problem.empty(); column += widths[r++]) {
    problem = size_problem(r, slot(r).bytes, n_row * widths[r] * sizeof(float));
    const float* block = static_cast<const float*>(slot(r).data);
    for (std::size_t row = 0; problem.empty() && row < n_row; ++row) {
      std::copy_n(block + row * widths[r], widths[r], all + row * total + column);
    }
  }
  part(call, problem);
}

void ThreadComm::send(Point point, const float* data, std::size_t count, int to, StreamHandle) {
  check_rank("send", to);
  if (to == rank_) throw std::logic_error("send: rank " + std::to_string(to) + " to itself");
  const Call call("send", point, stats_of(point), count * sizeof(float));
  Lock lock(group_->mutex);
  Letter& letter = group_->letters[rank_ * size_ + to];
  letter = {data, count, point, true, false};
  group_->changed.notify_all();
  try {
    wait(lock, call, to, [&] { return letter.taken; });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    letter.posted = false;  // the data goes away as this unwinds
    throw;
  }
}

void ThreadComm::recv(Point point, float* data, std::size_t count, int from, StreamHandle) {
  check_rank("recv", from);
  if (from == rank_) throw std::logic_error("recv: rank " + std::to_string(from) + " from itself");
  const Call call("recv", point, stats_of(point), count * sizeof(float));
  Lock lock(group_->mutex);
  Letter& letter = group_->letters[from * size_ + rank_];
  wait(lock, call, from, [&] { return letter.posted; });
  if (letter.count != count || letter.point != point) {
    const std::string theirs =
        std::to_string(letter.count) + " values at " + point_name(letter.point);
    lock.unlock();
    fail(call, std::to_string(count) + " values expected, but rank " +
                   std::to_string(world_rank(from)) + " sends " + theirs);
  }
  std::copy_n(letter.data, count, data);
  letter.posted = false;
  letter.taken = true;
  group_->changed.notify_all();
}

void ThreadComm::broadcast(Point point, std::span<std::byte> data, int root) {
  check_rank("broadcast", root);
  const Call call("broadcast", point, stats_of(point), data.size());
  Slot mine;
  mine.data = data.data();
  mine.bytes = data.size();
  meet(call, mine);
  const Slot& source = slot(root);
  const std::string problem = size_problem(root, source.bytes, data.size());
  if (problem.empty() && rank_ != root && !data.empty()) {
    std::memcpy(data.data(), source.data, data.size());
  }
  part(call, problem);
}

std::vector<std::vector<std::byte>> ThreadComm::gather_bytes(Point point,
                                                             std::span<const std::byte> mine,
                                                             int root) {
  check_rank("gather_bytes", root);
  Call call("gather_bytes", point, stats_of(point), mine.size());
  Slot shown;
  shown.data = mine.data();
  shown.bytes = mine.size();
  meet(call, shown);
  std::vector<std::vector<std::byte>> result;
  for (int r = 0; rank_ == root && r < size_; ++r) {
    const auto* bytes = static_cast<const std::byte*>(slot(r).data);
    result.emplace_back(bytes, bytes + slot(r).bytes);
    if (r != rank_) call.add_bytes(slot(r).bytes);
  }
  part(call);
  return result;
}

std::vector<std::vector<std::byte>> ThreadComm::all_gather_bytes(Point point,
                                                                 std::span<const std::byte> mine) {
  const Call call("all_gather_bytes", point, stats_of(point), mine.size() * size_);
  Slot shown;
  shown.data = mine.data();
  shown.bytes = mine.size();
  meet(call, shown);
  std::vector<std::vector<std::byte>> result;
  std::string problem;
  for (int r = 0; r < size_; ++r) {
    if (problem.empty()) problem = size_problem(r, slot(r).bytes, mine.size());
    const auto* bytes = static_cast<const std::byte*>(slot(r).data);
    result.emplace_back(bytes, bytes + slot(r).bytes);
  }
  part(call, problem);
  return result;
}

void ThreadComm::agree(const std::optional<Fault>& fault) {
  const Call call("agree", Point::kAgree, stats_of(Point::kAgree), 0);
  Slot mine;
  mine.fault = &fault;
  meet(call, mine);
  int from = -1;
  Fault agreed;
  for (int r = size_ - 1; r >= 0; --r) {
    if (!slot(r).fault->has_value()) continue;
    from = r;
    agreed = **slot(r).fault;
  }
  part(call);
  if (from >= 0) throw AgreedFault(from, size_, agreed);
}

void ThreadComm::barrier(Point point) {
  const Call call("barrier", point, stats_of(point), 0);
  meet(call, Slot{});
  part(call);
}

std::unique_ptr<Comm> ThreadComm::split(int colour, int key) {
  if (colour < 0)
    throw std::logic_error("split: colour " + std::to_string(colour) + " is negative");
  PointStats uncounted;
  const Call call("split", Point::kAgree, uncounted, 0);
  Slot mine;
  mine.colour = colour;
  mine.key = key;
  meet(call, mine);
  std::vector<int> members;
  for (int r = 0; r < size_; ++r) {
    if (slot(r).colour == colour) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return slot(a).key < slot(b).key; });
  const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
  if (place == 0) {  // the group's first rank makes it
    std::vector<int> world_ranks;
    for (int r : members) world_ranks.push_back(world_rank(r));
    group_->slots[rank_].made = make_group(group_->universe, std::move(world_ranks));
  }
  part(call);
  auto comm =
      std::make_unique<ThreadComm>(slot(members[0]).made, static_cast<int>(place), time_limit_s_);
  part(call);
  group_->slots[rank_].made.reset();
  return comm;
}

std::vector<std::unique_ptr<ThreadComm>> make_comms(int world) {
  if (world < 1) throw std::logic_error("a world of " + std::to_string(world) + " ranks");
  std::vector<int> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto group = make_group(std::make_shared<Universe>(world), ranks);
  std::vector<std::unique_ptr<ThreadComm>> comms;
  for (int r : ranks) {
    comms.push_back(std::make_unique<ThreadComm>(group, r, std::make_shared<double>(0)));
  }
  return comms;
}

}  // namespace

std::vector<std::unique_ptr<Comm>> make_thread_comms(int world) {
  std::vector<std::unique_ptr<Comm>> result;
  for (std::unique_ptr<ThreadComm>& comm : make_comms(world)) result.push_back(std::move(comm));
  return result;
}

void run_ranks(int world, const std::function<void(Comm&)>& body) {
  auto comms = make_comms(world);
  std::mutex mutex;
  std::exception_ptr cause;
  std::exception_ptr effect;
  const auto run = [&](ThreadComm& comm) {
    try {
      body(comm);
      comm.universe().leave(comm.rank());
      return;
    } catch (const Released&) {
      const std::lock_guard lock(mutex);
      if (!effect) effect = std::current_exception();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!cause) cause = std::current_exception();
    }
    comm.universe().fail(comm.rank());
  };
  std::vector<std::thread> threads;
  for (const auto& comm : comms) threads.emplace_back(run, std::ref(*comm));
  for (std::thread& thread : threads) thread.join();
  if (cause) std::rethrow_exception(cause);
  if (effect) std::rethrow_exception(effect);
}

}  // namespace k3
