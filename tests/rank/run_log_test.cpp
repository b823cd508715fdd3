#include "rank/run_log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "loader/h5.h"

namespace {

namespace fs = std::filesystem;
using k3::RunFacts;
using k3::RunLog;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("k3_run_log_test_" + std::to_string(getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string file(const char* name) const { return (path_ / name).string(); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

RunFacts facts() {
  RunFacts f;
  f.program = "k3run";
  f.command_line = "k3run --prompt 'x'";
  f.options = {{"model", "m.gguf"}, {"temp", "0.5"}};
  f.build = {{"commit", "0123456789ab"}};
  f.libraries = {{"mpi", "Open MPI"}};
  f.launcher = "mpirun";
  f.world = 2;
  return f;
}

k3::Decision drawn(std::int32_t id) {
  k3::Decision d;
  d.id = id;
  d.logit = 1.5f;
  d.logprob = -0.25;
  d.margin = std::numeric_limits<float>::infinity();
  return d;
}

std::vector<std::int32_t> token_ids(const std::string& path) {
  return k3::h5::File::open(path).root().open_group("tokens").open("id").read<std::int32_t>();
}

TEST_CASE("a log that was closed holds everything that was said, under the documented names") {
  const Folder folder;
  const std::string path = folder.file("run.h5");
  {
    RunLog log(path, facts());
    log.prompt(std::vector<std::int32_t>{5, 6, 7});
    k3::RankReport r0, r1;
    r0.host = "a";
    r1.host = "b";
    r1.rank = 1;
    r1.weight_bytes = 77;
    r1.priced_bytes = 80;
    r1.taken_bytes = 81;
    r1.load_s = 2.5;
    r1.points.resize(static_cast<std::size_t>(k3::Point::kCount));
    r1.points[2] = {3, 400, 0.5};
    log.ranks("loaded", std::vector<k3::RankReport>{r0, r1});
    log.warnings({"a dialect"});
    log.step(RunLog::Phase::kPrefill, {3, 0.25});
    log.step(RunLog::Phase::kDecode, {1, 0.125});
    log.token(drawn(11), 0.3);
    log.token(drawn(12), 0.1);
    log.summary("ttft_ms", 300);
    log.close("finished", "length");
    log.token(drawn(13), 0.1);  // after the end: nothing
    CHECK_FALSE(log.trouble());
  }
  const k3::h5::File file = k3::h5::File::open(path);
  const k3::h5::Group root = file.root();
  CHECK(root.string_attribute("schema") == "k3-run");
  CHECK(root.int_attribute("schema_version") == 1);
  CHECK(root.string_attribute("state") == "finished");
  CHECK(root.string_attribute("reason") == "length");
  CHECK(root.string_attribute("command_line") == "k3run --prompt 'x'");
  CHECK(root.int_attribute("world") == 2);
  CHECK(root.open_group("options").string_attribute("temp") == "0.5");
  CHECK(root.open_group("build").string_attribute("commit") == "0123456789ab");
  CHECK(root.open_group("prompt").open("id").read<std::int32_t>() ==
        std::vector<std::int32_t>{5, 6, 7});
  CHECK(root.open("warnings").read<std::string>() == std::vector<std::string>{"a dialect"});
  const k3::h5::Group ranks = root.open_group("ranks").open_group("loaded");
  CHECK(ranks.open("host").read<std::string>() == std::vector<std::string>{"a", "b"});
  CHECK(ranks.open("weight_bytes").read<std::uint64_t>() == std::vector<std::uint64_t>{0, 77});
  CHECK(ranks.open("priced_bytes").read<std::uint64_t>() == std::vector<std::uint64_t>{0, 80});
  CHECK(ranks.open("taken_bytes").read<std::uint64_t>() == std::vector<std::uint64_t>{0, 81});
  CHECK(ranks.open("load_s").read<double>() == std::vector<double>{0, 2.5});
  const auto n_point = static_cast<std::size_t>(k3::Point::kCount);
  CHECK(ranks.strings_attribute("points").size() == n_point);
  CHECK(ranks.open("calls").cols() == n_point);
  CHECK(ranks.open("calls").read<std::uint64_t>()[n_point + 2] == 3);
  CHECK(ranks.open("seconds").read<double>()[n_point + 2] == 0.5);
  const k3::h5::Group steps = root.open_group("steps");
  CHECK(steps.open("phase").read<std::int32_t>() == std::vector<std::int32_t>{0, 1});
  CHECK(steps.open("n_tok").read<std::int64_t>() == std::vector<std::int64_t>{3, 1});
  CHECK(steps.open("seconds").read<double>() == std::vector<double>{0.25, 0.125});
  CHECK(token_ids(path) == std::vector<std::int32_t>{11, 12});
  CHECK(root.open_group("tokens").open("seconds").read<double>() == std::vector<double>{0.3, 0.1});
  CHECK(root.open_group("summary").double_attribute("ttft_ms") == 300);
  CHECK_FALSE(fs::exists(path + "." + std::to_string(::getpid()) + ".tmp"));
}

TEST_CASE("a chat's turns follow each other, and each says where it ends") {
  const Folder folder;
  const std::string path = folder.file("run.h5");
  {
    RunLog log(path, facts());
    log.prompt(std::vector<std::int32_t>{5, 6, 7});
    log.token(drawn(11), 0.3);
    log.token(drawn(12), 0.1);
    log.reply(2, "stop");
    log.prompt(std::vector<std::int32_t>{8});
    log.token(drawn(13), 0.1);
    log.reply(1, "interrupted");
    log.close("finished", "quit");
  }
  const k3::h5::Group root = k3::h5::File::open(path).root();
  CHECK(root.open_group("prompt").open("id").read<std::int32_t>() ==
        std::vector<std::int32_t>{5, 6, 7, 8});
  const k3::h5::Group turns = root.open_group("turns");
  CHECK(turns.open("prompt_tokens").read<std::int64_t>() == std::vector<std::int64_t>{3, 1});
  CHECK(turns.open("generated_tokens").read<std::int64_t>() == std::vector<std::int64_t>{2, 1});
  CHECK(turns.open("reason").read<std::string>() ==
        std::vector<std::string>{"stop", "interrupted"});
  CHECK(token_ids(path) == std::vector<std::int32_t>{11, 12, 13});
}

TEST_CASE(
    "the file on the disk is whole and running from the first moment, and follows without a "
    "close") {
  const Folder folder;
  const std::string path = folder.file("run.h5");
  k3::RunLogOptions quick;
  quick.period_s = 0.05;
  RunLog log(path, facts(), quick);
  CHECK(k3::h5::File::open(path).root().string_attribute("state") == "running");
  CHECK(token_ids(path).empty());
  log.token(drawn(42), 0.1);
  // What a reader finds if the process were killed now. The wait has no upper limit worth testing on a busy machine.
  for (int i = 0; i < 1000 && token_ids(path).empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(token_ids(path) == std::vector<std::int32_t>{42});
  CHECK(k3::h5::File::open(path).root().string_attribute("state") == "running");
}

TEST_CASE("a log that nobody closed keeps its last words and the state running") {
  const Folder folder;
  const std::string path = folder.file("run.h5");
  {
    RunLog log(path, facts());
    log.token(drawn(42), 0.1);
  }
  CHECK(token_ids(path) == std::vector<std::int32_t>{42});
  CHECK(k3::h5::File::open(path).root().string_attribute("state") == "running");
}

TEST_CASE("a path that cannot be written is refused at once") {
  const Folder folder;
  CHECK_THROWS_AS(RunLog(folder.file("missing/run.h5"), facts()), std::system_error);
  CHECK_THROWS_AS(RunLog("", facts()), std::system_error);
  CHECK_THROWS_AS(RunLog("/dev/full/run.h5", facts()), std::system_error);
}

TEST_CASE("when later snapshots fail the run goes on, trouble says why, and the one before stays") {
  const Folder folder;
  const std::string inner = folder.file("disk");
  fs::create_directories(inner);
  const std::string path = inner + "/run.h5";
  RunLog log(path, facts());
  log.token(drawn(1), 0.1);
  // The folder goes away: for root, who may write anywhere, the nearest thing to a disk that fills up.
  fs::rename(inner, folder.file("elsewhere"));
  CHECK_NOTHROW(log.token(drawn(2), 0.1));
  log.close("finished", "length");
  REQUIRE(log.trouble());
  CHECK_MESSAGE(log.trouble()->find(path) != std::string::npos, *log.trouble());
  CHECK(log.trouble()->find('\n') == std::string::npos);
  CHECK(k3::h5::File::open(folder.file("elsewhere") + "/run.h5").root().string_attribute("state") ==
        "running");
}

TEST_CASE("several threads may write at once") {
  const Folder folder;
  const std::string path = folder.file("run.h5");
  k3::RunLogOptions quick;
  quick.period_s = 0.01;
  {
    RunLog log(path, facts(), quick);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&log, t] {
        for (int i = 0; i < 100; ++i) log.token(drawn(t), 0.1);
      });
    }
    for (std::thread& t : threads) t.join();
    log.close("finished", "length");
  }
  CHECK(token_ids(path).size() == 300);
}

}  // namespace
