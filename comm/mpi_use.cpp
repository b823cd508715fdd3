#include "comm/mpi_use.h"

#include <mpi.h>

#include <array>
#include <set>
#include <string_view>

namespace k3 {
namespace {

// Names of the control variables, as in "btl_tcp_if_include": framework, component, setting.
std::set<std::string> components(std::string_view framework) {
  std::set<std::string> out;
  int n = 0;
  if (MPI_T_cvar_get_num(&n) != MPI_SUCCESS) return out;
  for (int i = 0; i < n; ++i) {
    std::array<char, 256> name{};
    std::array<char, 8> about{};
    int name_size = name.size();
    int about_size = about.size();
    int verbosity = 0;
    int bind = 0;
    int scope = 0;
    MPI_Datatype type = MPI_DATATYPE_NULL;
    MPI_T_enum values = MPI_T_ENUM_NULL;
    // Fails for those of components that were closed.
    if (MPI_T_cvar_get_info(i, name.data(), &name_size, &verbosity, &type, &values, about.data(),
                            &about_size, &bind, &scope) != MPI_SUCCESS) {
      continue;
    }
    const std::string_view word = name.data();
    if (!word.starts_with(framework) || word.size() <= framework.size() ||
        word[framework.size()] != '_') {
      continue;
    }
    const std::string_view rest = word.substr(framework.size() + 1);
    const std::string component(rest.substr(0, rest.find('_')));
    if (component != "base" && rest.find('_') != std::string_view::npos) out.insert(component);
  }
  return out;
}

std::string joined(const std::set<std::string>& words) {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : ", ") + w;
  return out;
}

}  // namespace

std::string mpi_transport(const World& /*world*/) {
  int provided = 0;
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS) return {};
  const std::set<std::string> pml = components("pml");
  std::string out = joined(pml);
  if (pml.contains("ob1")) out += " over " + joined(components("btl"));
  if (pml.contains("cm")) out += " over " + joined(components("mtl"));
  MPI_T_finalize();
  return out;
}

}  // namespace k3
