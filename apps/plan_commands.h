// The sub-commands of k3plan: one file each, apps/plan_<name>.cpp; k3plan.cpp lists them.
#pragma once

#include <string>
#include <vector>

namespace k3 {

// A command reads the words after its name, prints to standard output and returns the exit code; --help and --version are
// its own. Throws as everything below main does; k3plan prints the line.
using PlanCommandFn = int (*)(const std::vector<std::string>& args);

// Who would hold what. What k3plan does where no command is named.
int plan_layout(const std::vector<std::string>& args);
// What is fully resident on which node.
int plan_fits(const std::vector<std::string>& args);
// What a model's files say and hold.
int plan_inspect(const std::vector<std::string>& args);
// What would make a job fail, hang or crawl on the ranks it is started on.
int plan_check_node(const std::vector<std::string>& args);

}  // namespace k3
