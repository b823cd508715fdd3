#include "comm/mpi_comm.h"

#include <mpi.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>

#include "comm/call.h"
#include "comm/mpi_exchange.h"
#include "comm/mpi_pulse.h"
#include "comm/ordered_sum.h"

namespace k3 {
namespace {

// Memory that grows to the largest request and is then reused; from the stage, or plain.
class Scratch {
 public:
  explicit Scratch(HostStage* stage) : stage_(stage) {}
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* floats(std::size_t count) {
    if (count > count_) {
      release();
      const std::size_t bytes = count * sizeof(float);
      data_ = stage_ != nullptr ? stage_->allocate(bytes) : new std::byte[bytes];
      count_ = count;
    }
    return reinterpret_cast<float*>(data_);
  }

 private:
  void release() {
    if (stage_ != nullptr && data_ != nullptr) stage_->release(data_);
    if (stage_ == nullptr) delete[] data_;
    data_ = nullptr;
    count_ = 0;
  }

  HostStage* stage_;
  std::byte* data_ = nullptr;
  std::size_t count_ = 0;
};

void check_start(int error, const char* call) {
  if (error == MPI_SUCCESS) return;
  throw LaunchError(std::string(call) + " failed (MPI error " + std::to_string(error) + ")");
}

class MpiComm : public Comm {
 public:
  MpiComm(MPI_Comm comm, std::vector<int> world_rank, std::shared_ptr<const WorldFacts> world,
          HostStage* stage, const MpiOptions& options, std::shared_ptr<double> time_limit_s)
      : options_(options), stage_(stage), scratch_(nullptr), staged_(stage) {
    time_limit_s_ = std::move(time_limit_s);
    context_.board = world->board;
    check_start(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
    size_ = static_cast<int>(world_rank.size());
    parts_.resize(world_rank.size());
    net_ = std::make_unique<MpiExchange>(comm, std::move(world_rank), std::move(world),
                                         options.max_message_bytes, time_limit_s_);
    pulse_ = std::make_unique<MpiPulse>(comm, rank_, size_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int world_rank(int r) const override { return net_->world_rank()[static_cast<std::size_t>(r)]; }
  std::string who() const override { return net_->me(); }

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
  void pulse(std::uint64_t done, std::uint64_t total) override {
    refuse_stuck(pulse_->beat(done, total, *time_limit_s_));
  }
  void finish_pulses() override {
    PointStats uncounted;  // no step contains it
    const Call call("loading", Point::kResidency, uncounted, 0, context_);
    refuse_stuck(pulse_->finish(*time_limit_s_));
  }

 private:
  void refuse_stuck(const std::optional<MpiPulse::Stuck>& stuck) const;
  void sum_small(const Call& call, float* data, std::size_t count);
  void sum_sliced(const Call& call, float* data, std::size_t count);
  void sum_host(const Call& call, float* data, std::size_t count);
  void gather_piece(const Call& call, const float* mine, float* all, std::size_t n_row,
                    std::span<const std::size_t> widths, std::size_t total);
  void gather_host(const Call& call, const float* mine, float* all, std::size_t n_row,
                   std::span<const std::size_t> widths, std::size_t total);
  void spread(const Call& call, void* data, std::size_t bytes, int root, Patience patience);
  void exchange_all(const Call& call, const void* mine, std::size_t bytes, std::byte* all);
  void check_rank(const char* what, int rank) const;

  MpiOptions options_;
  HostStage* stage_;
  std::unique_ptr<MpiExchange> net_;
  std::unique_ptr<MpiPulse> pulse_;
  int rank_ = 0;
  int size_ = 1;
  Scratch scratch_;                  // what the other ranks sent, before it is added or unpacked
  Scratch staged_;                   // host twins of device data
  std::vector<const float*> parts_;  // the addends of one sum, in rank order
};

void MpiComm::refuse_stuck(const std::optional<MpiPulse::Stuck>& stuck) const {
  if (!stuck) return;
  std::array<char, 48> waited{};
  std::array<char, 48> stands{};
  std::snprintf(waited.data(), waited.size(), "%.3g s", stuck->seconds);
  std::snprintf(stands.data(), stands.size(), "%.0f %%", 100 * stuck->done);
  throw CommError(who() + ": waited " + waited.data() + " in loading for rank " +
                  net_->world()->number_and_host(world_rank(stuck->rank)) + ", which stands at " +
                  stands.data());
}

void MpiComm::check_rank(const char* what, int rank) const {
  if (rank >= 0 && rank < size_) return;
  throw std::logic_error(std::string(what) + ": no rank " + std::to_string(rank) +
                         " in a group of " + std::to_string(size_));
}

void MpiComm::sum(Point point, float* data, std::size_t count, StreamHandle stream) {
  if (size_ == 1) return;
  const std::size_t bytes = count * sizeof(float);
  const Call call("sum", point, stats_of(point), bytes, context_);
  if (stage_ == nullptr) return sum_host(call, data, count);
  float* host = staged_.floats(count);
  stage_->to_host(host, data, bytes, stream);
  sum_host(call, host, count);
  stage_->to_device(data, host, bytes, stream);
}

void MpiComm::sum_host(const Call& call, float* data, std::size_t count) {
  for (std::size_t at = 0; at < count; at += options_.scratch_floats) {
    const std::size_t n = std::min(options_.scratch_floats, count - at);
    if (n * sizeof(float) * (size_ - 1) <= options_.small_sum_bytes) {
      sum_small(call, data + at, n);
    } else {
      sum_sliced(call, data + at, n);
    }
  }
}

// One exchange: everyone sends all to all and adds for itself. Least waiting.
void MpiComm::sum_small(const Call& call, float* data, std::size_t count) {
  float* received = scratch_.floats(count * size_);
  const std::size_t bytes = count * sizeof(float);
  for (int r = 0; r < size_; ++r) {
    parts_[r] = r == rank_ ? data : received + count * r;
    if (r != rank_) net_->recv(call, received + count * r, bytes, r);
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->send(call, data, bytes, r);
  }
  net_->finish(call);
  ordered_sum(parts_, 0, count, data);
}

// Two exchanges: rank r adds slice r of all ranks, then gives it to all. Least traffic.
void MpiComm::sum_sliced(const Call& call, float* data, std::size_t count) {
  const auto begin = [&](int r) { return count * r / size_; };
  const auto bytes = [&](int r) { return (begin(r + 1) - begin(r)) * sizeof(float); };
  const std::size_t my_begin = begin(rank_);
  const std::size_t my_count = begin(rank_ + 1) - my_begin;
  float* received = scratch_.floats(my_count * size_);
  for (int r = 0; r < size_; ++r) {
    parts_[r] = r == rank_ ? data + my_begin : received + my_count * r;
    if (r != rank_) net_->recv(call, received + my_count * r, bytes(rank_), r);
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->send(call, data + begin(r), bytes(r), r);
  }
  net_->finish(call);
  ordered_sum(parts_, 0, my_count, data + my_begin);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->recv(call, data + begin(r), bytes(r), r);
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->send(call, data + my_begin, bytes(rank_), r);
  }
  net_->finish(call);
}

void MpiComm::gather_rows(Point point, const float* mine, float* all, std::size_t n_row,
                          std::span<const std::size_t> widths, StreamHandle stream) {
  if (widths.size() != static_cast<std::size_t>(size_)) {
    throw std::logic_error("gather_rows: " + std::to_string(widths.size()) +
                           " widths for a group of " + std::to_string(size_));
  }
  const std::size_t total = std::accumulate(widths.begin(), widths.end(), std::size_t{0});
  const std::size_t bytes = n_row * total * sizeof(float);
  const Call call("gather_rows", point, stats_of(point), bytes, context_);
  if (stage_ == nullptr) return gather_host(call, mine, all, n_row, widths, total);
  const std::size_t my_count = n_row * widths[rank_];
  float* host_all = staged_.floats(n_row * total + my_count);
  float* host_mine = host_all + n_row * total;
  stage_->to_host(host_mine, mine, my_count * sizeof(float), stream);
  gather_host(call, host_mine, host_all, n_row, widths, total);
  stage_->to_device(all, host_all, bytes, stream);
}

void MpiComm::gather_host(const Call& call, const float* mine, float* all, std::size_t n_row,
                          std::span<const std::size_t> widths, std::size_t total) {
  if (total == 0) return;
  const std::size_t rows = std::max<std::size_t>(1, options_.scratch_floats / total);
  for (std::size_t at = 0; at < n_row; at += rows) {
    gather_piece(call, mine + at * widths[rank_], all + at * total, std::min(rows, n_row - at),
                 widths, total);
  }
}

void MpiComm::gather_piece(const Call& call, const float* mine, float* all, std::size_t n_row,
                           std::span<const std::size_t> widths, std::size_t total) {
  // A single row lies in `all` as it is sent; several rows arrive one below the other and are
  // spread out afterwards.
  const bool in_place = n_row == 1;
  float* blocks = in_place ? all : scratch_.floats(n_row * total);
  std::size_t column = 0;
  for (int r = 0; r < size_; column += widths[r++]) {
    if (r == rank_ || widths[r] == 0) continue;
    net_->recv(call, blocks + n_row * column, n_row * widths[r] * sizeof(float), r);
  }
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || widths[rank_] == 0) continue;
    net_->send(call, mine, n_row * widths[rank_] * sizeof(float), r);
  }
  net_->finish(call);
  column = 0;
  for (int r = 0; r < size_; column += widths[r++]) {
    if (r != rank_ && in_place) continue;
    const float* block = r == rank_ ? mine : blocks + n_row * column;
    for (std::size_t row = 0; row < n_row; ++row) {
      std::copy_n(block + row * widths[r], widths[r], all + row * total + column);
    }
  }
}

void MpiComm::send(Point point, const float* data, std::size_t count, int to, StreamHandle stream) {
  check_rank("send", to);
  const std::size_t bytes = count * sizeof(float);
  const Call call("send", point, stats_of(point), bytes, context_);
  if (stage_ != nullptr) {
    float* host = staged_.floats(count);
    stage_->to_host(host, data, bytes, stream);
    data = host;
  }
  net_->send(call, data, bytes, to);
  net_->finish(call);
}

void MpiComm::recv(Point point, float* data, std::size_t count, int from, StreamHandle stream) {
  check_rank("recv", from);
  const std::size_t bytes = count * sizeof(float);
  const Call call("recv", point, stats_of(point), bytes, context_);
  float* host = stage_ == nullptr ? data : staged_.floats(count);
  net_->recv(call, host, bytes, from);
  net_->finish(call);
  if (stage_ != nullptr) stage_->to_device(data, host, bytes, stream);
}

void MpiComm::broadcast(Point point, std::span<std::byte> data, int root) {
  check_rank("broadcast", root);
  const Call call("broadcast", point, stats_of(point), data.size(), context_);
  const Patience patience = point == Point::kStep ? Patience::kPolite : Patience::kBusy;
  spread(call, data.data(), data.size(), root, patience);
}

// A binomial tree. Counted from the root, rank v receives from v with its lowest set bit cleared
// and passes on to v + 1, v + 2, v + 4, ... below that bit, farthest first because that one has
// most to pass on.
void MpiComm::spread(const Call& call, void* data, std::size_t bytes, int root, Patience patience) {
  const int v = (rank_ - root + size_) % size_;
  const auto actual = [&](int virtual_rank) { return (virtual_rank + root) % size_; };
  int bit = 1;
  while (bit < size_ && (v & bit) == 0) bit <<= 1;
  if (v != 0) {
    net_->recv(call, data, bytes, actual(v - bit));
    net_->finish(call, patience);
  }
  for (int step = bit >> 1; step > 0; step >>= 1) {
    if (v + step < size_) net_->send(call, data, bytes, actual(v + step));
  }
  net_->finish(call, patience);
}

std::vector<std::vector<std::byte>> MpiComm::gather_bytes(Point point,
                                                          std::span<const std::byte> mine,
                                                          int root) {
  check_rank("gather_bytes", root);
  Call call("gather_bytes", point, stats_of(point), mine.size(), context_);
  std::vector<std::vector<std::byte>> result;
  std::uint64_t my_length = mine.size();
  if (rank_ != root) {
    net_->send(call, &my_length, sizeof my_length, root);
    net_->send(call, mine.data(), mine.size(), root);
    net_->finish(call);
    return result;
  }
  std::vector<std::uint64_t> lengths(size_);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->recv(call, &lengths[r], sizeof lengths[r], r);
  }
  net_->finish(call);
  result.resize(size_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) {
      result[r].assign(mine.begin(), mine.end());
      continue;
    }
    result[r].resize(lengths[r]);
    net_->recv(call, result[r].data(), result[r].size(), r);
    call.add_bytes(result[r].size());
  }
  net_->finish(call);
  return result;
}

// all[r * bytes ...] <- rank r's bytes, own place left to the caller's `mine`.
void MpiComm::exchange_all(const Call& call, const void* mine, std::size_t bytes, std::byte* all) {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->recv(call, all + bytes * r, bytes, r);
  }
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) net_->send(call, mine, bytes, r);
  }
  net_->finish(call);
  if (bytes > 0) std::memcpy(all + bytes * rank_, mine, bytes);
}

std::vector<std::vector<std::byte>> MpiComm::all_gather_bytes(Point point,
                                                              std::span<const std::byte> mine) {
  const Call call("all_gather_bytes", point, stats_of(point), mine.size() * size_, context_);
  std::vector<std::byte> all(mine.size() * size_);
  exchange_all(call, mine.data(), mine.size(), all.data());
  std::vector<std::vector<std::byte>> result(size_);
  for (int r = 0; r < size_; ++r) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(mine.size() * r);
    result[r].assign(begin, begin + static_cast<std::ptrdiff_t>(mine.size()));
  }
  return result;
}

void MpiComm::agree(const std::optional<Fault>& fault) {
  const Call call("agree", Point::kAgree, stats_of(Point::kAgree), 0, context_);
  struct Verdict {
    std::int32_t failed;
    std::int32_t exit_code;
    std::uint64_t line_bytes;
  };
  const Verdict mine{fault ? 1 : 0, fault ? fault->exit_code : 0, fault ? fault->line.size() : 0};
  std::vector<Verdict> all(size_);
  exchange_all(call, &mine, sizeof mine, reinterpret_cast<std::byte*>(all.data()));
  const auto first =
      std::find_if(all.begin(), all.end(), [](const Verdict& v) { return v.failed; });
  if (first == all.end()) return;
  const int from = static_cast<int>(first - all.begin());
  Fault agreed{first->exit_code, std::string(first->line_bytes, ' ')};
  if (from == rank_) agreed.line = fault->line;
  spread(call, agreed.line.data(), agreed.line.size(), from, Patience::kBusy);
  throw AgreedFault(from, size_, agreed);
}

void MpiComm::barrier(Point point) {
  const Call call("barrier", point, stats_of(point), 0, context_);
  std::byte nothing{};
  exchange_all(call, &nothing, 0, &nothing);
}

std::unique_ptr<Comm> MpiComm::split(int colour, int key) {
  if (colour < 0)
    throw std::logic_error("split: colour " + std::to_string(colour) + " is negative");
  // MPI_Comm_split has no time limit, so the ranks meet first where there is one. Not counted: no
  // step contains it.
  PointStats uncounted;
  const Call call("split", Point::kAgree, uncounted, 0);
  std::byte nothing{};
  exchange_all(call, &nothing, 0, &nothing);
  MPI_Comm group = MPI_COMM_NULL;
  net_->check(call, MPI_Comm_split(net_->comm(), colour, key, &group));
  int group_size = 0;
  net_->check(call, MPI_Comm_size(group, &group_size));
  std::vector<int> world_rank(group_size);
  const int my_world_rank = net_->world_rank()[rank_];
  net_->check(call,
              MPI_Allgather(&my_world_rank, 1, MPI_INT, world_rank.data(), 1, MPI_INT, group));
  return std::make_unique<MpiComm>(group, std::move(world_rank), net_->world(), stage_, options_,
                                   time_limit_s_);
}

}  // namespace

World::World() : facts_(read_launch_facts()), exceptions_(std::uncaught_exceptions()) {
  int running = 0;
  check_start(MPI_Initialized(&running), "MPI_Initialized");
  if (!running) {
    int provided = 0;
    check_start(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided),
                "MPI_Init_thread");
    owner_ = true;
    if (provided < MPI_THREAD_FUNNELED) {
      MPI_Finalize();
      throw LaunchError("this MPI library cannot be used by a program with threads");
    }
  }
  try {
    check_start(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
                "MPI_Comm_set_errhandler");
    check_start(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check_start(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    check_singletons(facts_, size_);
  } catch (...) {
    if (owner_) MPI_Finalize();
    throw;
  }
}

World::~World() {
  if (!owner_) return;
  if (std::uncaught_exceptions() > exceptions_) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Finalize();
}

namespace {

std::shared_ptr<const WorldFacts> world_facts(const World& world, MPI_Comm comm) {
  struct Process {
    std::array<char, 128> host{};
    int pid = 0;
  };
  Process mine;
  world.facts().host.copy(mine.host.data(), mine.host.size() - 1);
  mine.pid = getpid();
  std::vector<Process> all(static_cast<std::size_t>(world.size()));
  check_start(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, comm),
              "MPI_Allgather");
  auto facts = std::make_shared<WorldFacts>();
  facts->size = world.size();
  facts->host = world.facts().host;
  facts->board = world.board();
  for (const Process& p : all) {
    const bool here = p.host == mine.host;
    facts->pid.push_back(here ? p.pid : 0);
    facts->other_host.emplace_back(here ? "" : p.host.data());
  }
  return facts;
}

}  // namespace

std::unique_ptr<Comm> make_mpi_comm(World& world, HostStage* stage, const MpiOptions& options) {
  if (options.max_message_bytes == 0 || options.max_message_bytes > INT32_MAX ||
      options.scratch_floats == 0) {
    throw std::logic_error("make_mpi_comm: sizes must be positive and messages below 2^31 bytes");
  }
  MPI_Comm comm = MPI_COMM_NULL;
  check_start(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  std::vector<int> world_rank(world.size());
  std::iota(world_rank.begin(), world_rank.end(), 0);
  return std::make_unique<MpiComm>(comm, std::move(world_rank), world_facts(world, comm), stage,
                                   options, std::make_shared<double>(0));
}

LocalGroup local_group(World& world) {
  MPI_Comm comm = MPI_COMM_NULL;
  check_start(
      MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, world.rank(), MPI_INFO_NULL, &comm),
      "MPI_Comm_split_type");
  LocalGroup group;
  check_start(MPI_Comm_rank(comm, &group.rank), "MPI_Comm_rank");
  check_start(MPI_Comm_size(comm, &group.size), "MPI_Comm_size");
  check_start(MPI_Comm_free(&comm), "MPI_Comm_free");
  return group;
}

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  check_start(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
  const std::string all(text.data());
  return all.substr(0, all.find_first_of(",\n"));
}

void abort_world(int exit_code) {
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);  // MPI_Abort returns only where it failed
}

}  // namespace k3
