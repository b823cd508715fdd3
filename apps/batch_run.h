// The loop of a batch on rank 0: lines in, shared steps, lines out.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/batch_answer.h"
#include "apps/batch_lines.h"
#include "apps/batch_output.h"
#include "apps/batch_request.h"
#include "apps/batch_stats.h"
#include "rank/engine.h"
#include "rank/run_log.h"
#include "rank/scheduler.h"

namespace k3 {

struct BatchOptions {
  double grace_s = 20;        // running answers may go on for so long once the job is to end
  std::string session;  // a stored sequence whose state is kept for all prompts that begin with it
  std::int64_t n_prefix = 8;  // states kept for prompts that begin alike; 0: none
};

class BatchRun {
 public:
  // All must outlive it.
  BatchRun(Engine& engine, const Tokenizer& tokenizer, LineReader& in, BatchOutput& out,
           const BatchDefaults& defaults, const BatchOptions& options);

  // Until the input's end, or until `stopped` says so and the grace time is over. `show`: after every step, and while it
  // waits for input. Throws what the reader, the output and the engine throw; what was answered before is on the disk.
  void run(const std::function<bool()>& stopped, const std::function<void()>& show);

  const BatchStats& stats() const { return stats_; }
  BatchPlace place() const;
  std::size_t n_unfinished() const { return running_.size() + waiting_.size(); }
  bool input_ended() const { return ended_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Waiting {
    BatchRequest request;
    Clock::time_point read;
  };
  struct Running {
    Running(Waiting&& from, const Tokenizer& tokenizer)
        : request(std::move(from.request)), read(from.read), answer(request, tokenizer) {}
    BatchRequest request;
    Clock::time_point read, began, last;
    BatchAnswer answer;
    AnswerTimes times;
    int slot = 0;
    std::int64_t n_read = 0;
    std::int64_t cut = 0;
    std::uint64_t draw = 0;
    std::int32_t next = -1;  // drawn, not read yet
  };

  void read_lines(bool may_wait);
  bool take_line(const InputLine& line);
  void admit();
  bool waits_for_prefix(const BatchRequest& request) const;
  void start(Waiting&& waiting, int slot);
  void step();
  void after_part(Running& r, const PlannedPart& part, const Decision& d);
  void keep_prefix(Running& r);
  void finish(Running& r);
  void leave(Running& r);

  Engine& engine_;
  const Tokenizer& tokenizer_;
  LineReader& in_;
  BatchOutput& out_;
  const BatchDefaults& defaults_;
  const BatchOptions options_;
  PrefixStore prefixes_;
  std::deque<Waiting> waiting_;
  std::list<std::unique_ptr<Running>> running_;  // in the order in which they began
  std::vector<int> free_slots_;
  BatchStats stats_;
  const Clock::time_point began_ = Clock::now();
  bool ended_ = false;
};

// Counts and percentiles into the log's summary.
void log_stats(RunLog& log, const BatchStats& stats, double seconds);

}  // namespace k3
