#include "apps/plots.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/core.h>

#include "apps/figures.h"
#include "apps/svg.h"

namespace k3 {
namespace {

constexpr double kWidth = 900, kLeft = 70,
                 kRight = 640;   // of a panel with lines; its legend is right of it
constexpr double kLabels = 330;  // where bars begin
const Pen kGrid{"#ddd", 1, ""}, kFloor{"#777", 1.5, "6 4"};

// Engines keep their colour in every picture.
std::string color_of(const std::string& engine) {
  static const std::map<std::string, std::string> known{
      {"k3-fast", "#0b5fa5"},    {"k3-fast+peer", "#0b5fa5"},    {"k3-fast+nccl", "#5aa9e6"},
      {"k3-exact", "#12355b"},   {"llama.cpp", "#d9822b"},       {"sparkinfer", "#2f8f4e"},
      {"vllm+draft", "#8d5fd3"}, {"sparkinfer+skip", "#9bcf9f"}, {"sglang", "#c23b63"}};
  const auto found = known.find(engine);
  return found != known.end() ? found->second : "#666";
}

std::string unit_of(const std::string& metric) {
  return metric == "decode_ms" ? "ms a token" : metric == "load_gb_s" ? "GB/s" : "tok/s";
}

std::string figure(double v) {
  return v >= 1000  ? fmt::format("{:.0f}", v)
         : v >= 100 ? fmt::format("{:.1f}", v)
                    : fmt::format("{:.2f}", v);
}

// One panel of lines over named places on the x axis; the y axis begins at 0.
struct LinePanel {
  std::string title, x_words, y_words;
  std::vector<std::pair<double, std::string>> x_ticks;  // place (0 … 1), words
  struct Line {
    std::string name, color;
    std::vector<std::pair<double, double>> points;  // place, value
    bool dashed = false;
  };
  std::vector<Line> lines;

  static constexpr double kHeight = 330;

  double top() const {
    double most = 0;
    for (const Line& line : lines) {
      for (const auto& [place, value] : line.points) most = std::max(most, value);
    }
    return round_ticks(most).back();
  }

  void draw(Svg& svg, double y0) const {
    const double up = y0 + 45, down = y0 + kHeight - 55, most = top();
    const auto x = [](double place) { return kLeft + 30 + place * (kRight - kLeft - 60); };
    const auto y = [&](double value) { return down - value / most * (down - up); };
    svg.text(kLeft, y0 + 22, title, {15, "start", "#222", true});
    svg.text(kLeft, y0 + 39, y_words, {12, "start", "#555"});
    for (const double t : round_ticks(most)) {
      svg.line(kLeft, y(t), kRight, y(t), kGrid);
      svg.text(kLeft - 8, y(t) + 4, fmt::format("{:g}", t), {12, "end"});
    }
    for (const auto& [place, words] : x_ticks) {
      svg.line(x(place), down, x(place), down + 5, {"#555", 1, ""});
      svg.text(x(place), down + 19, words, {12, "middle"});
    }
    svg.text((kLeft + kRight) / 2, down + 38, x_words, {12, "middle", "#555"});
    for (const Line& line : lines) {
      std::vector<std::pair<double, double>> at;
      for (const auto& [place, value] : line.points) at.emplace_back(x(place), y(value));
      svg.path(at, line.dashed ? kFloor : Pen{line.color, 2, ""});
      if (line.dashed && at.size() == 1)
        svg.line(at[0].first - 20, at[0].second, at[0].first + 20, at[0].second, kFloor);
      if (line.dashed) continue;
      for (const auto& [px, py] : at) svg.dot(px, py, line.color);
    }
    legend(svg, y);
  }

  // Names beside the lines' ends, moved apart where they would meet.
  template <class Y>
  void legend(Svg& svg, const Y& y) const {
    std::vector<std::pair<double, const Line*>> ends;
    for (const Line& line : lines) ends.emplace_back(y(line.points.back().second), &line);
    std::sort(ends.begin(), ends.end());
    double last = -1e9;
    for (const auto& [wanted, line] : ends) {
      const double at = std::max(wanted, last + 17);
      last = at;
      const auto& [place, value] = line->points.back();
      std::string words = line->name + "  " + figure(value);
      for (const auto& [tick, name] : x_ticks) {
        if (tick == place && place < 1) words += " at " + name;
      }
      svg.text(kRight + 12, at + 4, words, {13, "start", line->color, !line->dashed});
    }
  }
};

template <class Panel>
std::string column_of(const std::vector<Panel>& panels, double height_of_one) {
  Svg svg(kWidth, height_of_one * static_cast<double>(panels.size()) + 10);
  double y = 0;
  for (const Panel& p : panels) {
    p.draw(svg, y);
    y += height_of_one;
  }
  return svg.str();
}

// ms a token over depth, for each node and model that we measured at two depths.
std::string depth_plot(const Ledger& l) {
  std::map<std::string, std::map<std::string, std::map<double, double>>> panels;
  std::map<std::string, std::map<double, double>> floors;
  std::set<std::string> ours;
  for (const SlotFigure& f : figures_of(l)) {
    const Slot& s = f.slot;
    if (s.metric != "decode_ms") continue;
    const std::string panel = s.model + " on " + s.node + ", " + s.quant + ", batch 1";
    auto& line = panels[panel][s.engine];
    line[s.depth()] = f.value;
    if (!f.peer && line.size() > 1) ours.insert(panel);
    if (const double floor = floor_at(l, s); floor > 0) floors[panel][s.depth()] = floor;
  }
  std::vector<LinePanel> out;
  for (const auto& [name, engines] : panels) {
    if (ours.count(name) == 0) continue;
    LinePanel p{name,
                "tokens in the cache (each tick is 4 times the one before)",
                "decode, ms a token (lower is better)",
                {},
                {}};
    const auto place = [](double depth) { return (std::log2(std::max(depth, 128.0)) - 7) / 10; };
    for (double d = 128; d <= 131072; d *= 4)
      p.x_ticks.emplace_back(place(d), fmt::format("{:g}", d));
    const auto add = [&](const std::string& label, const std::map<double, double>& line,
                         bool dashed) {
      LinePanel::Line out_line{label, dashed ? "#555" : color_of(label), {}, dashed};
      for (const auto& [depth, value] : line) out_line.points.emplace_back(place(depth), value);
      p.lines.push_back(out_line);
    };
    for (const auto& [engine, line] : engines) add(engine, line, false);
    if (const auto floor = floors.find(name); floor != floors.end())
      add("floor", floor->second, true);
    out.push_back(p);
  }
  return out.empty() ? "" : column_of(out, LinePanel::kHeight);
}

// Every group of the scaling table, over its nodes.
std::string scaling_plot(const Ledger& l) {
  std::vector<LinePanel> out;
  for (const auto& [name, engines] : scaling_groups(l)) {
    std::vector<std::pair<double, std::string>> nodes;
    std::string metric;
    for (const auto& [engine, series] : engines) {
      for (const SlotFigure& f : series) nodes.emplace_back(f.slot.devices(), f.slot.node);
      metric = series.front().slot.metric;
    }
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    const auto place = [&](const std::string& node) {
      const auto at =
          std::find_if(nodes.begin(), nodes.end(), [&](auto& n) { return n.second == node; });
      const double steps = nodes.size() > 1 ? static_cast<double>(nodes.size() - 1) : 1;
      return static_cast<double>(at - nodes.begin()) / steps;
    };
    LinePanel p{
        name,
        "node",
        unit_of(metric) + (metric == "decode_ms" ? " (lower is better)" : " (higher is better)"),
        {},
        {}};
    for (const auto& [devices, node] : nodes) p.x_ticks.emplace_back(place(node), node);
    for (const auto& [engine, series] : engines) {
      LinePanel::Line line{engine, color_of(engine), {}, false};
      for (const SlotFigure& f : series) line.points.emplace_back(place(f.slot.node), f.value);
      p.lines.push_back(line);
    }
    out.push_back(p);
  }
  return out.empty() ? "" : column_of(out, LinePanel::kHeight);
}

// A panel of horizontal bars with words before and after each.
struct BarPanel {
  std::string title, about;
  struct Bar {
    std::string name, words, color;
    double value = 0;
  };
  std::vector<Bar> bars;
  std::vector<std::pair<std::string, double>> marks;  // upright lines: a floor, peers

  static constexpr double kRow = 22, kHead = 66, kMark = 16;

  double height() const {
    return kHead + kRow * static_cast<double>(bars.size()) +
           kMark * static_cast<double>(marks.size()) + 20;
  }

  double draw(Svg& svg, double y0) const {
    double most = 0;
    for (const Bar& b : bars) most = std::max(most, b.value);
    for (const auto& [name, value] : marks) most = std::max(most, value);
    const auto x = [&](double value) { return kLabels + value / most * (kWidth - kLabels - 150); };
    svg.text(20, y0 + 24, title, {15, "start", "#222", true});
    svg.text(20, y0 + 43, about, {12, "start", "#555"});
    double y = y0 + kHead;
    const double first = y - 4, last = first + kRow * static_cast<double>(bars.size());
    double under = last + kMark;
    for (const auto& [name, value] : marks) {
      const std::string color = name == "floor" ? "#777" : color_of(name);
      svg.line(x(value), first, x(value), under - 10, {color, 1.5, "6 4"});
      const double half = 3.6 * static_cast<double>(name.size() + 7);
      svg.rect(x(value) - half, under - 9, 2 * half, 14, "#fff");
      svg.text(x(value), under + 2, name + " " + figure(value), {12, "middle", color, true});
      under += kMark;
    }
    for (const Bar& b : bars) {
      svg.rect(kLabels, y, x(b.value) - kLabels, kRow - 6, b.color);
      svg.text(kLabels - 8, y + 12.5, b.name, {12, "end"});
      svg.rect(x(b.value) + 3, y, 6.6 * static_cast<double>(b.words.size()) + 6, kRow - 6, "#fff");
      svg.text(x(b.value) + 6, y + 12.5, b.words, {12, "start"});
      y += kRow;
    }
    return height();
  }
};

std::string column_of(const std::vector<BarPanel>& panels) {
  double height = 10;
  for (const BarPanel& p : panels) height += p.height();
  Svg svg(kWidth, height);
  double y = 0;
  for (const BarPanel& p : panels) y += p.draw(svg, y);
  return svg.str();
}

// Device time of each phase, for each slot its newest traced log.
std::string phases_plot(const Ledger& l) {
  std::map<std::string, const MeasuredRun*> newest;
  for (const auto& [name, run] : l.runs) {
    if (run.phases.empty() || run.slot.empty()) continue;
    const MeasuredRun*& at = newest[run.slot];
    if (!at || at->started < run.started) at = &run;
  }
  std::vector<BarPanel> out;
  for (const auto& [slot, run] : newest) {
    double sum = 0;
    for (const auto& [phase, ms] : run->phases) sum += ms;
    BarPanel p{
        slot,
        fmt::format("{}, commit {}: ms a step, traced without a graph: {:.2f}; in the graph {:.2f}",
                    run->file, run->commit.substr(0, 7), sum, run->value),
        {},
        {}};
    for (const auto& [phase, ms] : run->phases)
      p.bars.push_back(
          {phase, fmt::format("{:.3f}  ({:.1f} %)", ms, 100 * ms / sum), "#0b5fa5", ms});
    out.push_back(p);
  }
  return out.empty() ? "" : column_of(out);
}

// Every run of a slot that has several, oldest first, beside floor and peers.
std::string ladder_plot(const Ledger& l) {
  std::map<std::string, std::vector<const MeasuredRun*>> slots;
  for (const auto& [name, run] : l.runs) {
    if (!run.slot.empty()) slots[run.slot].push_back(&run);
  }
  std::vector<BarPanel> out;
  for (auto& [slot, runs] : slots) {
    if (runs.size() < 2) continue;
    std::sort(runs.begin(), runs.end(), [](auto* a, auto* b) { return a->started < b->started; });
    const Slot s = Slot::parse(slot, false);
    BarPanel p{slot,
               unit_of(s.metric) +
                   (lower_is_better(slot) ? ", lower is better" : ", higher is better") +
                   "; oldest first; grey: not kept or failing its gate",
               {},
               {}};
    for (const MeasuredRun* r : runs) {
      const bool kept = l.failed.count(r->file) == 0 && !gate_of(l, *r).failed;
      p.bars.push_back(
          {r->file.substr(0, r->file.size() - 3),
           figure(r->value) + "  " + r->commit.substr(0, 7) + (kept ? "" : "  not kept"),
           kept ? color_of(s.engine) : "#bbb", r->value});
    }
    if (const double floor = floor_at(l, s); floor > 0) p.marks.emplace_back("floor", floor);
    for (const SlotFigure& f : figures_of(l)) {
      if (f.peer && f.slot.place() == s.place()) p.marks.emplace_back(f.slot.engine, f.value);
    }
    // The longest line is drawn first, and so no label is crossed by another's.
    std::sort(p.marks.begin(), p.marks.end(), [](auto& a, auto& b) { return a.second > b.second; });
    out.push_back(p);
  }
  return out.empty() ? "" : column_of(out);
}

}  // namespace

std::vector<Plot> make_plots(const Ledger& l) {
  std::vector<Plot> out;
  for (const auto& [name, svg] : {std::pair{"decode-depth.svg", depth_plot(l)},
                                  {"scaling.svg", scaling_plot(l)},
                                  {"phases.svg", phases_plot(l)},
                                  {"ladder.svg", ladder_plot(l)}}) {
    if (!svg.empty()) out.push_back({name, svg});
  }
  return out;
}

}  // namespace k3
