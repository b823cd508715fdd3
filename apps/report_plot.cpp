// k3report plot and scaling: pictures and tables of what results/ holds.
#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "apps/figures.h"
#include "apps/local_main.h"
#include "apps/plots.h"
#include "apps/report_commands.h"

namespace k3 {

int report_plot(const std::vector<std::string>& args) {
  ReportRequest q;
  Options options(
      {"k3report plot", "k3report plot --out DIR [--results DIR]",
       "Draws decode-depth.svg (ms a token over depth), scaling.svg (over numbers of "
       "devices), phases.svg\n"
       "(device time of a step's phases) and ladder.svg (every run of a slot), from the "
       "logs and the\n"
       "peers' figures in baselines.lock. The same folder gives the same bytes.\n",
       "  k3report plot --out results/plots\n"});
  add_report_options(options, q, false);
  options.text("--out", "DIR", q.out, "Where to write; made if it is not there.");
  if (!parsed(options, args)) return 0;
  if (q.out.empty()) throw std::invalid_argument("--out: k3report plot needs a folder");
  std::error_code failed;
  std::filesystem::create_directories(q.out, failed);
  if (failed) throw std::system_error(failed, q.out);
  for (const Plot& p : make_plots(read_ledger(q.folder))) {
    const std::string path = (std::filesystem::path(q.out) / p.name).string();
    write_result(path, p.svg);
    print_line(path);
  }
  return 0;
}

int report_scaling(const std::vector<std::string>& args) {
  ReportRequest q;
  Options options({"k3report scaling", "k3report scaling [--results DIR] [--out FILE]",
                   "Markdown tables of what was measured on more than one number of devices, ours "
                   "and peers': value,\n"
                   "speed-up and efficiency over the smallest number, share of the floor. Ours are "
                   "the frontier's.\n",
                   "  k3report scaling --results results --out results/scaling.md\n"});
  add_report_options(options, q, true);
  if (!parsed(options, args)) return 0;
  write_result(q.out, "# Scaling\n\n" + scaling_table(read_ledger(q.folder)));
  return 0;
}

}  // namespace k3
