#include "apps/reply_text.h"

#include <utility>

#include "rank/utf8.h"

namespace k3 {

void ReplyText::add(std::string_view text) {
  if (text.empty()) return;
  out_ += text;
  line_open_ = text.back() != '\n';
}

void ReplyText::enter(Part part, std::string_view heading) {
  const bool silent = part == Part::kAnswer && part_ == Part::kNone;
  part_ = part;
  if (silent) return;
  if (line_open_) add("\n");
  add(heading);
}

std::string ReplyText::push(const std::vector<ReplyEvent>& events) {
  for (const ReplyEvent& e : events) {
    switch (e.kind) {
      case ReplyEvent::Kind::kReasoning:
        if (part_ != Part::kThinking) enter(Part::kThinking, "[thinking]\n");
        add(e.text);
        break;
      case ReplyEvent::Kind::kAnswer:
        if (part_ != Part::kAnswer) enter(Part::kAnswer, "[answer]\n");
        add(e.text);
        break;
      case ReplyEvent::Kind::kCallStart:
        enter(Part::kCall, "[call " + e.text + "] ");
        break;
      case ReplyEvent::Kind::kCallArguments:
        add(e.text);
        break;
      case ReplyEvent::Kind::kCallEnd:
      case ReplyEvent::Kind::kFinish:
        break;
    }
  }
  return std::exchange(out_, {});
}

std::string ReplyText::end() {
  if (line_open_) add("\n");
  return std::exchange(out_, {});
}

std::string for_terminal(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Utf8Scan scan = utf8_scan(text);
    const std::string_view part = text.substr(0, scan.n);
    const bool control = scan.kind != Utf8Scan::Kind::kWhole || scan.code_point < 0x20 ||
                         (scan.code_point >= 0x7f && scan.code_point <= 0x9f);
    out += !control || part == "\n" || part == "\t" ? part : "\xef\xbf\xbd";
    text.remove_prefix(scan.n);
  }
  return out;
}

}  // namespace k3
