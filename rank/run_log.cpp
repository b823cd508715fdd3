#include "rank/run_log.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <exception>
#include <mutex>
#include <thread>

#include <fmt/core.h>

#include "loader/h5.h"
#include "loader/parts.h"

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

std::string utc_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&now, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

void set_all(h5::Group group, const NamedTexts& values) {
  for (const auto& [name, value] : values) group.set(name, value);
}

template <class T>
void append(h5::Dataset& to, T value) {
  to.append(std::span<const T>(&value, 1));
}

// Column `name` of the table of reports.
template <class T, class Field>
void write_column(h5::Group& group, const char* name, std::span<const RankReport> reports,
                  Field field) {
  std::vector<T> column;
  for (const RankReport& r : reports) column.push_back(field(r));
  group.write<T>(name, column);
}

// [ranks, points]; a report that lists fewer points has zeros there.
template <class T, class Field>
void write_points(h5::Group& group, const char* name, std::span<const RankReport> reports,
                  Field field) {
  const auto n_point = static_cast<std::size_t>(Point::kCount);
  std::vector<T> table(reports.size() * n_point);
  for (std::size_t r = 0; r < reports.size(); ++r) {
    for (std::size_t p = 0; p < std::min(n_point, reports[r].points.size()); ++p) {
      table[r * n_point + p] = field(reports[r].points[p]);
    }
  }
  group.write<T>(name, table, n_point);
}

}  // namespace

struct RunLog::Impl {
  const std::string path;
  const RunLogOptions options;
  const Clock::time_point began = Clock::now();

  mutable std::mutex lock;  // guards all below
  std::condition_variable wake;
  h5::File file;
  h5::Group root;
  h5::Dataset step_phase, step_n_tok, step_seconds, step_end;
  h5::Dataset token_id, token_seconds, token_end, token_logit, token_logprob, token_margin;
  std::int64_t n_turn_prompt = 0;
  bool dirty = false;
  bool closed = false;
  bool ending = false;
  std::optional<std::string> trouble;

  std::thread saver;

  Impl(std::string p, const RunLogOptions& o)
      : path(std::move(p)),
        options(o),
        file(h5::File::create_in_memory(path)),
        root(file.root()),
        step_phase(steps().create<std::int32_t>("phase")),
        step_n_tok(steps().create<std::int64_t>("n_tok")),
        step_seconds(steps().create<double>("seconds")),
        step_end(steps().create<double>("end_s")),
        token_id(tokens().create<std::int32_t>("id")),
        token_seconds(tokens().create<double>("seconds")),
        token_end(tokens().create<double>("end_s")),
        token_logit(tokens().create<double>("logit")),
        token_logprob(tokens().create<double>("logprob")),
        token_margin(tokens().create<double>("margin")) {}

  h5::Group steps() { return root.group("steps"); }
  h5::Group tokens() { return root.group("tokens"); }
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - began).count(); }

  // `lock` held.
  void snapshot() {
    dirty = false;
    try {
      file.snapshot(path);
      trouble.reset();
    } catch (const std::exception& e) {
      trouble = e.what();
      dirty = true;  // worth another try: space may be freed
    }
  }

  // A step may last longer than the period, so the main thread cannot be the one that looks at the clock.
  void save_periodically() {
    std::unique_lock held(lock);
    while (!ending) {
      wake.wait_for(held, std::chrono::duration<double>(options.period_s), [&] { return ending; });
      if (!ending && dirty) {
        root.set("saved_s", elapsed());
        snapshot();
      }
    }
  }

  // Runs `change` unless the log is closed. Errors of HDF5's in-memory file (out of memory) are trouble like a full
  // disk: the run's text matters more than its log.
  template <class Change>
  void change(const Change& f) {
    const std::lock_guard held(lock);
    if (closed) return;
    try {
      dirty = true;
      f();
    } catch (const std::exception& e) {
      trouble = fmt::format("{}: {}", path, e.what());
    }
  }
};

RunLog::RunLog(std::string path, const RunFacts& facts, const RunLogOptions& options)
    : impl_(std::make_unique<Impl>(std::move(path), options)) {
  h5::Group& root = impl_->root;
  root.set("schema", kRunSchema);
  root.set("schema_version", kRunSchemaVersion);
  root.set("state", "running");
  root.set("reason", "");
  root.set("error", "");
  root.set("program", facts.program);
  root.set("command_line", facts.command_line);
  root.set("started", utc_now());
  root.set("saved_s", 0.0);
  root.set("launcher", facts.launcher);
  root.set("job", facts.job);
  root.set("world", facts.world);
  set_all(root.group("options"), facts.options);
  set_all(root.group("build"), facts.build);
  set_all(root.group("libraries"), facts.libraries);
  impl_->file.snapshot(impl_->path);
  impl_->saver = std::thread([impl = impl_.get()] { impl->save_periodically(); });
}

RunLog::~RunLog() {
  {
    const std::lock_guard held(impl_->lock);
    impl_->ending = true;
    if (!impl_->closed && impl_->dirty) impl_->snapshot();
  }
  impl_->wake.notify_all();
  impl_->saver.join();
}

void RunLog::model(const ModelFile& file, const ModelConfig& config) {
  const std::string fingerprint = file.fingerprint();  // reads the disk: not under the lock
  impl_->change([&] {
    h5::Group group = impl_->root.group("model");
    group.set("name", config.name);
    group.set("fingerprint", fingerprint);
    group.set("bytes", file.bytes());
    group.set("tensor_bytes", file.tensor_bytes());
    group.set("n_layer", config.n_layer);
    group.set("n_vocab", config.n_vocab);
    std::vector<std::string> paths;
    std::vector<std::uint64_t> bytes;
    for (const PartInfo& part : file.parts()) {
      paths.push_back(part.path);
      bytes.push_back(part.bytes);
    }
    group.write<std::string>("part_path", paths);
    group.write<std::uint64_t>("part_bytes", bytes);
  });
}

void RunLog::chosen(const RunConfig& config) {
  impl_->change([&] { set_all(impl_->root.group("chosen"), describe(config)); });
}

void RunLog::warnings(const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  impl_->change([&] { impl_->root.write<std::string>("warnings", lines); });
}

void RunLog::ranks(const std::string& when, std::span<const RankReport> reports) {
  impl_->change([&] {
    h5::Group g = impl_->root.group("ranks/" + when);
    g.set("at_s", impl_->elapsed());
    std::vector<std::string> points;
    for (std::size_t p = 0; p < static_cast<std::size_t>(Point::kCount); ++p) {
      points.emplace_back(point_name(static_cast<Point>(p)));
    }
    g.set("points", points);
    write_column<std::string>(g, "host", reports, [](const RankReport& r) { return r.host; });
    write_column<std::string>(g, "device", reports, [](const RankReport& r) { return r.device; });
    using U64 = std::uint64_t;
    write_column<U64>(g, "plan_bytes", reports, [](const RankReport& r) { return r.plan_bytes; });
    write_column<U64>(g, "weight_bytes", reports,
                      [](const RankReport& r) { return r.weight_bytes; });
    write_column<U64>(g, "state_bytes", reports, [](const RankReport& r) { return r.state_bytes; });
    write_column<U64>(g, "work_bytes", reports, [](const RankReport& r) { return r.work_bytes; });
    write_column<U64>(g, "mapped_bytes", reports,
                      [](const RankReport& r) { return r.mapped_bytes; });
    write_column<U64>(g, "priced_bytes", reports,
                      [](const RankReport& r) { return r.priced_bytes; });
    write_column<U64>(g, "taken_bytes", reports, [](const RankReport& r) { return r.taken_bytes; });
    write_column<U64>(g, "rss_bytes", reports, [](const RankReport& r) { return r.rss_bytes; });
    write_column<U64>(g, "peak_rss_bytes", reports,
                      [](const RankReport& r) { return r.peak_rss_bytes; });
    write_column<double>(g, "load_s", reports, [](const RankReport& r) { return r.load_s; });
    write_points<U64>(g, "calls", reports, [](const PointStats& s) { return s.calls; });
    write_points<U64>(g, "bytes", reports, [](const PointStats& s) { return s.bytes; });
    write_points<double>(g, "seconds", reports, [](const PointStats& s) { return s.seconds; });
  });
}

void RunLog::prompt(std::span<const std::int32_t> ids) {
  impl_->change([&] {
    h5::Group group = impl_->root.group("prompt");
    h5::Dataset to = group.has("id") ? group.open("id") : group.create<std::int32_t>("id");
    to.append(ids);
    impl_->n_turn_prompt = static_cast<std::int64_t>(ids.size());
  });
}

void RunLog::reply(std::int64_t n_token, const std::string& finish_reason) {
  impl_->change([&] {
    h5::Group group = impl_->root.group("turns");
    const bool first = !group.has("reason");
    const auto column = [&]<class T>(const char* name, T value) {
      h5::Dataset to = first ? group.create<T>(name) : group.open(name);
      append(to, value);
    };
    column("prompt_tokens", impl_->n_turn_prompt);
    column("generated_tokens", n_token);
    column("reason", finish_reason);
  });
}

void RunLog::step(Phase phase, const StepTiming& timing) {
  impl_->change([&] {
    append(impl_->step_phase, static_cast<std::int32_t>(phase));
    append(impl_->step_n_tok, timing.n_tok);
    append(impl_->step_seconds, timing.seconds);
    append(impl_->step_end, impl_->elapsed());
  });
}

void RunLog::token(const Decision& token, double seconds) {
  impl_->change([&] {
    append(impl_->token_id, token.id);
    append(impl_->token_seconds, seconds);
    append(impl_->token_end, impl_->elapsed());
    append(impl_->token_logit, static_cast<double>(token.logit));
    append(impl_->token_logprob, token.logprob);
    append(impl_->token_margin, static_cast<double>(token.margin));
  });
}

void RunLog::summary(const std::string& name, double value) {
  impl_->change([&] { impl_->root.group("summary").set(name, value); });
}

void RunLog::bench(const BenchRecord& record) {
  impl_->change([&] {
    h5::Group g = impl_->root.group("bench");
    g.set("command", record.command);
    for (const auto& [name, value] : record.texts) g.set(name, value);
    for (const auto& [name, value] : record.numbers) g.set(name, value);
    g.write<std::int32_t>("untimed_id", record.untimed_ids);
    g.write<std::int32_t>("id", record.ids);
    g.write<double>("seconds", record.seconds);
    h5::Group ranks = impl_->root.group("bench/ranks");
    for (const auto& [name, values] : record.rank_columns) ranks.write<double>(name, values);
    for (const BenchTable& t : record.tables) {
      h5::Group table = impl_->root.group("bench/" + t.name);
      for (const auto& [name, values] : t.texts) table.write<std::string>(name, values);
      for (const auto& [name, values] : t.numbers) table.write<double>(name, values);
    }
  });
}

void RunLog::close(const std::string& state, const std::string& reason, const std::string& line) {
  impl_->change([&] {
    impl_->root.set("state", state);
    impl_->root.set("reason", reason);
    impl_->root.set("error", line);
    impl_->root.set("ended", utc_now());
    impl_->root.set("saved_s", impl_->elapsed());
    impl_->snapshot();
    impl_->closed = true;
  });
}

std::optional<std::string> RunLog::trouble() const {
  const std::lock_guard held(impl_->lock);
  return impl_->trouble;
}

const std::string& RunLog::path() const { return impl_->path; }

}  // namespace k3
