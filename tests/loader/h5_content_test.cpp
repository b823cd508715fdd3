#include "loader/h5_content.h"

#include <functional>

#include "loader/h5.h"
#include "tests/loader/gguf_bytes.h"

namespace k3::h5 {

using test::refusal_of;
using test::TempDir;

namespace {

std::string stream_of(const std::string& path) {
  std::string out;
  visit_content(path, [&](std::span<const std::byte> bytes) {
    out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  return out;
}

std::string stream_of(const std::function<void(Group&)>& fill) {
  const TempDir dir;
  {
    File file = File::create(dir / "a.h5");
    Group root = file.root();
    fill(root);
  }
  return stream_of(dir / "a.h5");
}

const std::vector<double> kTimes{0.5, 0.25, 0.125};

}  // namespace

TEST_CASE("content does not depend on the order of creation, chunks or replaced values") {
  const std::string plain = stream_of([](Group& root) {
    root.set("commit", "0123");
    root.set("world", 8);
    root.group("bench").write<double>("seconds", kTimes);
    root.group("steps").set("note", "");
  });
  const std::string other = stream_of([](Group& root) {
    root.group("steps").set("note", "");
    Dataset grown = root.group("bench").create<double>("seconds", 0, 2);
    for (const double t : kTimes) grown.append<double>(std::span(&t, 1));
    root.set("world", 7);
    root.set("world", 8);
    root.set("commit", "0123");
  });
  CHECK(plain == other);
}

TEST_CASE("content changes with every name, type, shape and value") {
  const auto base = [](Group& root) {
    root.set("commit", "0123");
    root.group("bench").write<double>("seconds", kTimes);
    root.group("bench").write<std::string>("name", std::vector<std::string>{"ab", "c"});
  };
  const std::string plain = stream_of(base);
  const auto differs = [&](const std::function<void(Group&)>& change) {
    return stream_of([&](Group& root) {
             base(root);
             change(root);
           }) != plain;
  };
  CHECK(!differs([](Group&) {}));
  CHECK(differs([](Group& r) { r.set("commit", "0124"); }));
  CHECK(differs([](Group& r) { r.set("commit2", "0123"); }));
  CHECK(differs([](Group& r) { r.group("other"); }));
  CHECK(differs([](Group& r) { r.group("bench").set("n", 1); }));
  CHECK(differs([](Group& r) {
    r.group("bench").write<double>("seconds", std::vector<double>{0.5, 0.25, 0.126});
  }));
  CHECK(differs([](Group& r) {  // the same numbers, another width
    r.group("bench").write<float>("seconds", std::vector<float>{0.5F, 0.25F, 0.125F});
  }));
  CHECK(differs([](Group& r) { r.group("bench").write<double>("seconds", kTimes, 3); }));
  CHECK(stream_of([](Group& r) { r.set("a", 1); }) != stream_of([](Group& r) { r.set("b", 1); }));
  const std::vector<double> six(6);
  CHECK(stream_of([&](Group& r) { r.write<double>("d", six, 3); }) !=
        stream_of([&](Group& r) { r.write<double>("d", six, 2); }));
  // Zeros have the same bytes as numbers of both kinds.
  CHECK(stream_of([&](Group& r) { r.write<double>("d", six); }) !=
        stream_of([](Group& r) { r.write<std::int64_t>("d", std::vector<std::int64_t>(6)); }));
  CHECK(differs([](Group& r) {  // the same letters, cut elsewhere
    r.group("bench").write<std::string>("name", std::vector<std::string>{"a", "bc"});
  }));
}

TEST_CASE("a file that is no HDF5 is refused by name") {
  const TempDir dir;
  std::ofstream(dir / "x.h5") << "text";
  CHECK(refusal_of([&] { stream_of(dir / "x.h5"); }).find("x.h5: /: cannot be opened") !=
        std::string::npos);
}

}  // namespace k3::h5
