// k3report ladder: the page of measured runs, so that no number is typed twice.
#include <filesystem>
#include <stdexcept>
#include <string>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "apps/job.h"
#include "apps/report_commands.h"
#include "loader/h5.h"

namespace k3 {
namespace {

// Three to four digits that matter.
std::string figure(double v) {
  return v >= 100 ? fmt::format("{:.1f}", v) : fmt::format("{:.2f}", v);
}

double number_or(const h5::Group& g, const char* name, double otherwise) {
  return g.has_attribute(name) ? g.double_attribute(name) : otherwise;
}

struct Measured {
  std::string text;
  std::string unit;
};

Measured measured_of(const h5::Group& bench) {
  const auto spread = [&](const std::string& u) {
    return fmt::format("{} ({} – {}) {}", figure(bench.double_attribute("median_" + u)),
                       figure(bench.double_attribute("p10_" + u)),
                       figure(bench.double_attribute("p90_" + u)), u == "tok_s" ? "tok/s" : u);
  };
  const std::string command = bench.string_attribute("command");
  if (command == "decode") return {spread("ms"), "ms"};
  if (command == "prefill") return {spread("tok_s"), "tok/s"};
  if (command == "load") {
    return {fmt::format("{} GB/s, {:.0f} % of a raw parallel read",
                        figure(bench.double_attribute("load_gb_s")),
                        100 * bench.double_attribute("load_over_raw")),
            "GB/s"};
  }
  throw std::invalid_argument("a row for a log of k3bench " + command +
                              ": expected decode, prefill or load");
}

std::string floor_of(const h5::Group& bench, const std::string& unit, const nlohmann::json& row) {
  if (row.contains("floor")) return row.at("floor").get<std::string>();
  const double floor = number_or(bench, unit == "tok/s" ? "floor_tok_s" : "floor_ms", 0);
  return floor > 0 ? figure(floor) + " " + unit : "–";
}

std::string row_text(const std::filesystem::path& folder, const nlohmann::json& row) {
  const auto name = row.at("log").get<std::string>();
  const h5::File file = h5::File::open((folder / name).string());
  const h5::Group bench = file.root().open_group("bench");
  const Measured m = measured_of(bench);
  const double predicted = number_or(bench, "predicted", 0);
  const std::string check = bench.has_attribute("check_top1")
                                ? fmt::format("; top-1 {:.3f}, KLD {:.2g} against exact",
                                              bench.double_attribute("check_top1"),
                                              bench.double_attribute("check_kld_mean"))
                                : "";
  return fmt::format("| {} | {} | {} | {} | {}{} | {} | `{}` |\n",
                     bench.string_attribute("commit").substr(0, 7),
                     row.at("what").get<std::string>(), floor_of(bench, m.unit, row),
                     predicted > 0 ? fmt::format("{:g} {}", predicted, m.unit) : "–", m.text, check,
                     row.at("kept").get<std::string>(), name);
}

std::string lines(const nlohmann::json& words, const char* name) {
  std::string out;
  for (const auto& line : words.at(name)) out += line.get<std::string>() + "\n";
  return out;
}

std::string ladder(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / "ladder.json").string();
  nlohmann::json words;
  try {
    words = nlohmann::json::parse(read_text(path));
    std::string out = "# Ladder\n\n" + lines(words, "intro") + "\n";
    out += "| commit | what | floor | predicted | measured, median (p10 – p90) | kept | log |\n";
    out += "|---|---|---:|---:|---:|---|---|\n";
    for (const auto& row : words.at("rows")) out += row_text(folder, row);
    return out + "\n" + lines(words, "outro");
  } catch (const nlohmann::json::exception& e) {
    throw std::invalid_argument(path + ": " + e.what());
  }
}

}  // namespace

int report_ladder(const std::vector<std::string>& args) {
  ReportRequest q;
  Options options(
      {"k3report ladder", "k3report ladder [--results DIR] [--out FILE]",
       "Writes the ladder: a Markdown table of measured runs, one row a log. The words "
       "(what was done,\n"
       "whether it was kept) come from ladder.json in the folder of the logs, all numbers "
       "from the logs:\n"
       "commit, floor, prediction, median and percentiles. A number that the log lacks is "
       "a dash, or the\n"
       "words' \"floor\".\n",
       "  k3report ladder --results results --out results/ladder.md\n"
       "  k3report ladder --results results | diff - results/ladder.md\n"});
  add_report_options(options, q, true);
  if (!parsed(options, args)) return 0;
  write_result(q.out, ladder(q.folder));
  return 0;
}

}  // namespace k3
