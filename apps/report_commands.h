// The sub-commands of k3report: one file each, apps/report_<name>.cpp; k3report.cpp lists them.
#pragma once

#include <string>
#include <vector>

#include "apps/options.h"

namespace k3 {

// A command reads the words after its name and returns the exit code; --help and --version are its own. Throws as everything
// below main does; k3report prints the line.
using ReportCommandFn = int (*)(const std::vector<std::string>& args);

int report_ladder(const std::vector<std::string>& args);
int report_keygen(const std::vector<std::string>& args);
int report_seal(const std::vector<std::string>& args);
int report_verify(const std::vector<std::string>& args);
int report_verdict(const std::vector<std::string>& args);
int report_plot(const std::vector<std::string>& args);
int report_scaling(const std::vector<std::string>& args);

// What the commands share (report_options.cpp).
struct ReportRequest {
  std::string folder = "results", out;
};
void add_report_options(Options& options, ReportRequest& q, bool writes);
// False: a page has been printed, there is nothing to run.
bool parsed(Options& options, const std::vector<std::string>& args);
// To the file `out`, or to standard output where it is empty. Throws std::system_error naming the file.
void write_result(const std::string& out, const std::string& text);

}  // namespace k3
