#include "apps/svg.h"

#include <cmath>

#include <fmt/core.h>

namespace k3 {
namespace {

std::string escaped(const std::string& words) {
  std::string out;
  for (const char c : words) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else
      out += c;
  }
  return out;
}

std::string stroke(const Pen& pen) {
  return fmt::format("stroke=\"{}\" stroke-width=\"{:g}\"", pen.color, pen.width) +
         (pen.dash.empty() ? "" : " stroke-dasharray=\"" + pen.dash + "\"");
}

}  // namespace

void Svg::text(double x, double y, const std::string& words, const Lettering& how) {
  body_ += fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{:g}\" text-anchor=\"{}\" fill=\"{}\"{}>{}"
      "</text>\n",
      x, y, how.size, how.anchor, how.color, how.bold ? " font-weight=\"bold\"" : "",
      escaped(words));
}

void Svg::line(double x1, double y1, double x2, double y2, const Pen& pen) {
  body_ += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1,
                       y1, x2, y2, stroke(pen));
}

void Svg::path(const std::vector<std::pair<double, double>>& points, const Pen& pen) {
  std::string list;
  for (const auto& [x, y] : points) list += fmt::format("{:.1f},{:.1f} ", x, y);
  body_ += "<polyline points=\"" + list + "\" fill=\"none\" " + stroke(pen) + "/>\n";
}

void Svg::rect(double x, double y, double width, double height, const std::string& color) {
  body_ += fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n", x, y,
      width, height, color);
}

void Svg::dot(double x, double y, const std::string& color) {
  body_ += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", x, y, color);
}

std::string Svg::str() const {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
             "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"Helvetica, Arial, sans-serif\">\n"
             "<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#fff\"/>\n",
             width_, height_) +
         body_ + "</svg>\n";
}

std::vector<double> round_ticks(double top) {
  const double power = std::pow(10, std::floor(std::log10(top > 0 ? top : 1)));
  double step = power;
  for (const double s : {0.2, 0.5, 1.0, 2.0}) {
    step = s * power;
    if (top / step <= 5) break;
  }
  std::vector<double> out;
  for (int i = 0; i == 0 || out.back() < top; ++i) out.push_back(i * step);
  return out;
}

}  // namespace k3
