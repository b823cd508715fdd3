#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "tests/tidy/house_rules.h"

namespace fs = std::filesystem;
using k3::test::broken_rules;
using k3::test::types_in;

namespace {

bool is_source(const fs::path& path) {
  const std::string e = path.extension().string();
  return e == ".h" || e == ".cpp" || e == ".cu" || e == ".cuh";
}

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Exactly one rule is broken, and the line says `what`.
void check_caught(const char* path, const std::string& text, const std::string& what) {
  const auto found = broken_rules(path, text);
  REQUIRE(found.size() == 1);
  CHECK_MESSAGE(found[0].find(what) != std::string::npos, found[0]);
}

}  // namespace

TEST_CASE("every source file keeps to the table of who may know what") {
  int n_file = 0;
  for (const char* folder : {"apps", "rank", "comm", "kernels", "loader", "tests"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(K3_SOURCE_DIR) / folder)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      ++n_file;
      const std::string path = fs::relative(entry.path(), K3_SOURCE_DIR).generic_string();
      for (const std::string& line : broken_rules(path, read(entry.path()))) FAIL_CHECK(line);
    }
  }
  CHECK(n_file > 20);
}

TEST_CASE("no two headers define a type of the same name") {
  // Linked into one program they would share constructors and tables of virtual functions, and no tool need say so.
  std::map<std::string, std::string> seen;
  for (const char* folder : {"apps", "rank", "comm", "kernels", "loader"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(K3_SOURCE_DIR) / folder)) {
      const std::string e = entry.path().extension().string();
      if (e != ".h" && e != ".cuh") continue;
      const std::string path = fs::relative(entry.path(), K3_SOURCE_DIR).generic_string();
      for (const std::string& type : types_in(read(entry.path()))) {
        const auto at = seen.emplace(type, path).first;
        if (at->second != path)
          FAIL_CHECK(path << ": defines " << type << ", as " << at->second << " does");
      }
    }
  }
  CHECK(seen.size() > 100);
  CHECK(seen.at("k3::Plan") == "rank/plan.h");
}

TEST_CASE("types of a header are told with their namespaces") {
  const auto types = types_in(
      "namespace k3 {\nclass A;\nstruct B final : C {\n  struct Inner {};\n};\nenum class E : int "
      "{ kOne };\n"
      "template <>\nstruct B<int> {\n};\nstruct Declared f(int);\n}\nnamespace k3::h5 {\nclass A "
      "{\n};\n}\n");
  CHECK(types == std::vector<std::string>{"k3::B", "k3::E", "k3::h5::A"});
}

TEST_CASE("the lower rooms include each other only for the block types and the peer view") {
  check_caught("loader/gguf.cpp", "#include \"comm/comm.h\"\n",
               "loader/gguf.cpp:1: includes \"comm/comm.h\"");
  check_caught("kernels/cpu/x.cpp", "\n#include \"loader/gguf.h\"\n",
               "kernels/cpu/x.cpp:2: includes");
  check_caught("comm/x.cpp", "#  include \"kernels/backend.h\"\n", "comm/ may not");
  check_caught("rank/x.cpp", "#include \"apps/options.h\"\n", "rank/ may not");
  check_caught("comm/x.h", "#include \"rank/plan.h\"", "comm/ may not");
  check_caught("loader/x.h", "#include \"blocks.h\"\n", "loader/ may not");
  CHECK(
      broken_rules("kernels/x.cpp", "#include \"loader/blocks.h\"\n#include \"comm/peer_view.h\"\n")
          .empty());
  CHECK(broken_rules("comm/x.cpp", "#include \"loader/blocks.h\"\n#include <mpi.h>\n").empty());
  CHECK(
      broken_rules("rank/x.cpp", "#include \"loader/gguf.h\"\n#include \"comm/comm.h\"\n").empty());
}

TEST_CASE("rank never sees MPI, CUDA, NCCL or HDF5, by header or by name") {
  check_caught("rank/x.cpp", "#include <mpi.h>\n", "includes <mpi.h>");
  check_caught("rank/x.cpp", "#include <hdf5.h>\n", "includes <hdf5.h>");
  check_caught("rank/x.cpp", "#include <cuda_runtime.h>\n", "includes <cuda_runtime.h>");
  check_caught("rank/x.cpp", "#include <nccl.h>\n", "includes <nccl.h>");
  check_caught("rank/x.cpp", "int a;\n  MPI_Barrier(c);\n", "rank/x.cpp:2: uses MPI_Barrier");
  check_caught("rank/x.cpp", "cudaMalloc(&p, n);\n", "uses cudaMalloc");
  check_caught("rank/x.cpp", "H5Fopen(f);\n", "uses H5Fopen");
  check_caught("rank/x.cpp", "std::cout << 1;\n", "uses std::cout");
  CHECK(broken_rules("rank/x.cpp",
                     "// MPI_Barrier, cudaMalloc\nauto s = \"H5Fopen\"; /* ncclSend */\n")
            .empty());
}

TEST_CASE("only apps/options parses options, and apps makes no call of MPI or CUDA") {
  check_caught("apps/k3run.cpp", "#include <boost/program_options.hpp>\n", "apps/options");
  CHECK(broken_rules("apps/options.cpp", "#include <boost/program_options.hpp>\n").empty());
  check_caught("apps/k3run.cpp", "MPI_Abort(c, 1);\n", "uses MPI_Abort");
  CHECK(broken_rules("apps/k3run.cpp", "#include <iostream>\nvoid f() { std::cout << 1; }\n")
            .empty());
}

TEST_CASE("only the launcher reads the environment") {
  check_caught("loader/x.cpp", "auto a = std::getenv(\"A\");\n", "environment");
  check_caught("tests/rank/x_test.cpp", "auto a = secure_getenv(\"A\");\n", "environment");
  CHECK(broken_rules("comm/launcher.cpp", "auto a = std::getenv(\"A\");\n").empty());
  CHECK(broken_rules("rank/x.cpp", "// no getenv here\n").empty());
}

TEST_CASE("nothing creates or uses multicast objects, in calls or in assembly") {
  check_caught("comm/x.cu", "cuMulticastCreate(&handle, &prop);\n", "uses cuMulticastCreate");
  check_caught("kernels/cuda/x.cu", "asm(\"multimem.ld_reduce.add.f32\");\n", "uses multimem");
  CHECK(broken_rules("comm/x.cu", "// never multimem\n").empty());
}

TEST_CASE("a file of more than 900 lines is two files") {
  std::string text;
  for (int i = 0; i < 900; ++i) text += "\n";
  CHECK(broken_rules("rank/x.cpp", text).empty());
  check_caught("rank/x.cpp", text + "\n", "901 lines");
}

TEST_CASE("comments and literals are told from code") {
  using k3::test::strip;
  CHECK(strip("a // b\nc", false) == "a \nc");
  CHECK(strip("a /* b\n */ c", false) == "a \n c");
  CHECK(strip("f(\"// \\\" x\") + g", false) == "f() + g");
  CHECK(strip("f(\"//\")", true) == "f(\"//\")");
  CHECK(strip("1'000 + 'x' + h", false) == "1'000 +  + h");
  CHECK(strip("R\"(\" // )\" + y", false) == " + y");
}
