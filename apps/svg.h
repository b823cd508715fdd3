// A picture as SVG text: the few shapes that charts are made of. Pixels from the top left; the background is white, so that a
// picture reads the same on any page. The same calls give the same bytes.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace k3 {

struct Pen {
  std::string color = "#222";
  double width = 1;
  std::string dash;  // "4 3"; empty: a full line
};

struct Lettering {
  double size = 13;
  std::string anchor = "start";  // "middle", "end": what x is of the text
  std::string color = "#222";
  bool bold = false;
};

class Svg {
 public:
  Svg(double width, double height) : width_(width), height_(height) {}
  void text(double x, double y, const std::string& words, const Lettering& how = {});
  void line(double x1, double y1, double x2, double y2, const Pen& pen = {});
  void path(const std::vector<std::pair<double, double>>& points, const Pen& pen);
  void rect(double x, double y, double width, double height, const std::string& color);
  void dot(double x, double y, const std::string& color);
  std::string str() const;

 private:
  double width_, height_;
  std::string body_;
};

// Round values from 0 to at least `top`: 4 to 6 of them.
std::vector<double> round_ticks(double top);

}  // namespace k3
