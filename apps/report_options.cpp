#include <cerrno>
#include <cstdio>
#include <system_error>

#include "apps/build_info.h"
#include "apps/local_main.h"
#include "apps/report_commands.h"

namespace k3 {

void add_report_options(Options& options, ReportRequest& q, bool writes) {
  options.group("Report");
  options.text("--results", "DIR", q.folder, "Where the logs are, and what is said of them.");
  if (writes) options.text("--out", "FILE", q.out, "Where to write. [default: standard output]");
}

bool parsed(Options& options, const std::vector<std::string>& args) {
  switch (options.parse(args)) {
    case Options::Outcome::kHelp:
      write_out(options.help());
      return false;
    case Options::Outcome::kVersion:
      write_out(version_text("k3report") + "\n");
      return false;
    case Options::Outcome::kRun:
      break;
  }
  return true;
}

void write_result(const std::string& out, const std::string& text) {
  if (out.empty()) return write_out(text);
  std::FILE* file = std::fopen(out.c_str(), "w");
  const bool written =
      file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = file != nullptr && std::fclose(file) == 0;
  if (!written || !closed) throw std::system_error(errno, std::generic_category(), out);
}

}  // namespace k3
