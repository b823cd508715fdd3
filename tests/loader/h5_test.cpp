#include "loader/h5.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <system_error>

#include "tests/loader/gguf_bytes.h"

namespace k3::h5 {

using test::has;
using test::refusal_of;
using test::TempDir;

namespace {

template <class T>
std::span<const T> view(const std::vector<T>& v) {
  return v;
}

}  // namespace

TEST_CASE("attributes of every kind read back, and may be replaced") {
  const TempDir dir;
  const std::string path = dir / "a.h5";
  {
    File file = File::create(path);
    Group root = file.root();
    root.set("command", "k3run --model m.gguf");
    root.set("command", "k3run --model \xc3\xa9.gguf");  // replaced, UTF-8
    root.set("empty", "");
    root.set("seconds", 1.25);
    root.set("ranks", 8);
    root.set("seed", ~std::uint64_t{0});
    root.set("hosts", std::vector<std::string>{"n1", "", "n3"});
    root.set("no_hosts", std::vector<std::string>{});
    root.set("times", std::vector<double>{0.5, 1e300});
    Group run = root.group("run/rank0");
    run.set("bytes", std::vector<std::int64_t>{1, -2});
  }
  const File file = File::open(path);
  const Group root = file.root();
  CHECK(root.string_attribute("command") == "k3run --model \xc3\xa9.gguf");
  CHECK(root.string_attribute("empty").empty());
  CHECK(root.double_attribute("seconds") == 1.25);
  CHECK(root.int_attribute("ranks") == 8);
  CHECK(root.strings_attribute("hosts") == std::vector<std::string>{"n1", "", "n3"});
  CHECK(root.strings_attribute("no_hosts").empty());
  CHECK(root.doubles_attribute("times") == std::vector<double>{0.5, 1e300});
  CHECK(root.open_group("run/rank0").ints_attribute("bytes") == std::vector<std::int64_t>{1, -2});
  CHECK(root.has_attribute("ranks"));
  CHECK(!root.has_attribute("absent"));
  CHECK(root.has("run"));
  CHECK(root.has("run/rank0"));
  CHECK(!root.has("run/rank1"));
  CHECK(!root.has("walk/rank0"));
  CHECK(root.names() == std::vector<std::string>{"run"});
}

TEST_CASE("datasets of every type read back with their shape") {
  const TempDir dir;
  const std::string path = dir / "d.h5";
  const std::vector<float> floats{1.5f, -0.0f, 3e38f, 4, 5, 6};
  const std::vector<std::int32_t> ints{1, -2, 3};
  const std::vector<std::uint64_t> big{~std::uint64_t{0}};
  const std::vector<std::string> words{"a", "", "caf\xc3\xa9"};
  {
    File file = File::create(path);
    Group root = file.root();
    root.write("floats", view(floats), 3);
    root.write("ints", view(ints));
    root.write("big", view(big));
    root.write("words", view(words));
    root.write("none", std::span<const double>());
    root.write("ints", view(std::vector<std::int32_t>{7}));  // replaced
    CHECK(has(refusal_of([&] { root.write("bad", view(ints), 2); }),
              "3 values are not whole rows of 2"));
  }
  const Group root = File::open(path).root();
  const Dataset d = root.open("floats");
  CHECK(d.dims() == std::vector<std::uint64_t>{2, 3});
  CHECK(d.rows() == 2);
  CHECK(d.cols() == 3);
  CHECK(d.read<float>() == floats);
  CHECK(d.read<double>()[0] == 1.5);  // converted
  CHECK(root.open("ints").read<std::int64_t>() == std::vector<std::int64_t>{7});
  CHECK(root.open("big").read<std::uint64_t>() == big);
  CHECK(root.open("words").read<std::string>() == words);
  CHECK(root.open("none").read<double>().empty());
  CHECK(has(refusal_of([&] { root.open("floats").read<std::string>(); }), "holds no strings"));
}

TEST_CASE("appendable datasets grow by whole rows") {
  File file = File::create_in_memory("run.h5");
  Group root = file.root();
  Dataset ids = root.create<std::int32_t>("ids", 0, 4);
  Dataset times = root.create<double>("times", 2);
  Dataset lines = root.create<std::string>("lines");
  CHECK(ids.rows() == 0);
  CHECK(ids.read<std::int32_t>().empty());
  std::vector<std::int32_t> expected;
  for (std::int32_t i = 0; i < 10; ++i) {
    ids.append(view(std::vector<std::int32_t>{i, 2 * i}));
    expected.insert(expected.end(), {i, 2 * i});
    times.append(view(std::vector<double>{0.5 * i, 1.0}));
    lines.append(view(std::vector<std::string>{"line " + std::to_string(i)}));
  }
  times.append(std::span<const double>());
  CHECK(ids.read<std::int32_t>() == expected);
  CHECK(times.dims() == std::vector<std::uint64_t>{10, 2});
  CHECK(times.read<double>()[18] == 4.5);
  CHECK(lines.read<std::string>()[9] == "line 9");
  CHECK(has(refusal_of([&] {
              times.append(view(std::vector<double>{1, 2, 3}));
            }),
            "run.h5: times: append: 3 values are not whole rows of 2"));
  root.write("fixed", view(expected));
  Dataset fixed = root.open("fixed");
  CHECK(has(refusal_of([&] { fixed.append(view(expected)); }), "cannot grow"));
}

TEST_CASE("errors are one line with the file, the object and HDF5's reason") {
  const TempDir dir;
  const std::string absent = refusal_of([&] { File::open(dir / "absent.h5"); });
  CHECK(has(absent, dir / "absent.h5" + ": open: "));
  test::write_bytes(dir / "text.h5", std::vector<std::byte>(100, std::byte{'x'}));
  CHECK(has(refusal_of([&] { File::open(dir / "text.h5"); }), ": open: "));
  CHECK_THROWS_AS(File::create(dir / "no/such/folder.h5"), std::system_error);
  const File file = File::create_in_memory("run.h5");
  const Group root = file.root();
  CHECK(has(refusal_of([&] { root.open("tokens"); }), "run.h5: tokens: open dataset: "));
  CHECK(has(refusal_of([&] { root.int_attribute("n"); }), "run.h5: n: read attribute: "));
}

TEST_CASE("a snapshot is a whole file and later writes do not touch it") {
  const TempDir dir;
  const std::string path = dir / "run.h5";
  File file = File::create_in_memory("run.h5");
  Group root = file.root();
  root.set("program", "k3run");
  Dataset ids = root.create<std::int64_t>("ids");
  for (std::int64_t n = 1; n <= 3; ++n) {
    ids.append(view(std::vector<std::int64_t>(100000, n)));
    file.snapshot(path);
    CHECK(!std::filesystem::exists(path + "." + std::to_string(::getpid()) + ".tmp"));
    const File disk = File::open(path);
    CHECK(disk.root().string_attribute("program") == "k3run");
    CHECK(disk.root().open("ids").rows() == static_cast<std::uint64_t>(n) * 100000);
    CHECK(disk.root().open("ids").read<std::int64_t>().back() == n);
  }
  CHECK(std::filesystem::file_size(path) == file.bytes());
}

TEST_CASE("a process killed while it takes snapshots leaves a file that opens") {
  const TempDir dir;
  const std::string path = dir / "run.h5";
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    File file = File::create_in_memory("run.h5");
    Dataset ids = file.root().create<std::int64_t>("ids");
    const std::vector<std::int64_t> row(20000, 7);
    for (;;) {
      ids.append(view(row));
      file.snapshot(path);
      if (write(ready[1], "x", 1) != 1) _exit(1);
    }
  }
  char byte = 0;
  for (int i = 0; i < 3; ++i) REQUIRE(read(ready[0], &byte, 1) == 1);
  kill(child, SIGKILL);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  close(ready[0]);
  close(ready[1]);
  const std::uint64_t rows = File::open(path).root().open("ids").rows();
  CHECK(rows >= 3 * 20000);
  CHECK(rows % 20000 == 0);
}

TEST_CASE("a snapshot onto a full disk throws and keeps the last one") {
  const TempDir dir;
  const std::string path = dir / "run.h5";
  File file = File::create_in_memory("run.h5");
  Dataset ids = file.root().create<std::int64_t>("ids");
  ids.append(view(std::vector<std::int64_t>(10, 1)));
  file.snapshot(path);
  ids.append(view(std::vector<std::int64_t>(1 << 18, 2)));
  {
    // No file may pass 64 KiB: what a full disk looks like to a writer.
    rlimit old{};
    getrlimit(RLIMIT_FSIZE, &old);
    const rlimit limit{1 << 16, old.rlim_max};
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_THROWS_AS(file.snapshot(path), std::system_error);
    setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, handler);
  }
  CHECK(!std::filesystem::exists(path + "." + std::to_string(::getpid()) + ".tmp"));
  CHECK(File::open(path).root().open("ids").rows() == 10);
  file.snapshot(path);  // and goes on when there is room again
  CHECK(File::open(path).root().open("ids").rows() == 10 + (1 << 18));
}

TEST_CASE("handles close what they own, once") {
  File a = File::create_in_memory("a");
  File b = std::move(a);
  b.root().set("x", 1);
  Group g = b.root();
  Group h = std::move(g);
  g = std::move(h);
  g.set("x", 2);
  CHECK(g.int_attribute("x") == 2);
  a = File::create_in_memory("c");
  b = std::move(a);
  CHECK(!b.root().has_attribute("x"));
}

}  // namespace k3::h5
