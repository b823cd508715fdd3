#include "rank/chat_parser.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "rank/chat_tags.h"
#include "rank/json_text.h"
#include "rank/utf8.h"

namespace k3 {
namespace {

using Kind = ReplyEvent::Kind;

bool is_json_object(const std::string& s) {
  const std::size_t first = s.find_first_not_of(kChatBlanks);
  return first != s.npos && s[first] == '{' && nlohmann::json::accept(s);
}

// Whole characters of a stream of bytes; what is none becomes U+FFFD.
class Characters {
 public:
  std::string push(std::string_view bytes) {
    waiting_ += bytes;
    std::string_view rest = waiting_;
    std::string out;
    while (!rest.empty()) {
      const Utf8Scan scan = utf8_scan(rest);
      if (scan.kind == Utf8Scan::Kind::kCut) break;
      out += scan.kind == Utf8Scan::Kind::kWhole ? rest.substr(0, scan.n) : kReplacement;
      rest.remove_prefix(scan.n);
    }
    waiting_ = std::string(rest);
    return out;
  }
  std::string flush() {
    return std::exchange(waiting_, {}).empty() ? std::string() : std::string(kReplacement);
  }

 private:
  static constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  std::string waiting_;
};

}  // namespace

struct ReplyParser::Impl {
  enum class Section {
    kMessage,  // between the sections
    kThink,
    kResponse,
    kTools,  // between the calls
    kCall,   // between a call's arguments
    kArgument,
    kJson,
    kDone
  };
  // Where a tag stands in reply.raw.
  struct Span {
    std::size_t begin, end;
  };
  struct PendingHead {
    Marker marker;
    bool is_spelled;  // came as text, and is text again if no tag follows
    std::size_t begin;
    std::string text;
  };

  explicit Impl(bool thinking) : section(thinking ? Section::kThink : Section::kResponse) {
    has_response = !thinking;
  }

  // The stream cut into markers and text.
  void push_text(std::string_view bytes);
  void flush_text() { text(std::exchange(held, {})); }
  void marker(Marker m, std::string_view spelling, bool is_spelled);
  void text(std::string_view bytes);
  void end_of_input();

  // Tags out of markers and text.
  void head_text(std::string_view s);
  void end_head(bool has_sep);
  void drop_head();
  void open(const TagHead& head, Span span);
  void close(std::string_view name, Span span);

  // Content.
  void content(std::string_view s);
  void loose_answer(std::string_view s);
  void start_call(const TagHead& head, std::size_t begin);
  void end_call(std::size_t end);
  void break_call();
  void start_argument(const TagHead& head);
  void argument_text(std::string_view s);
  void start_json();
  void json_text(std::string_view s);
  void end_argument();
  void emit(Kind kind, std::string_view s);
  void emit_arguments(std::string_view s);

  bool in_call() const {
    return section == Section::kCall || section == Section::kArgument || section == Section::kJson;
  }
  bool in_tools() const { return section == Section::kTools || in_call(); }
  ParsedCall& call() { return reply.tool_calls.back(); }
  std::string_view innermost() const;

  ParsedReply reply;
  std::vector<ReplyEvent> events;
  Section section;
  bool has_response = false;  // one has been opened
  bool is_ended = false;      // by a token
  bool is_finished = false;
  std::vector<TextSegment> closing;  // once finished

  std::string held;  // of push_text: may become a marker
  Characters characters;
  std::optional<PendingHead> head;
  std::string blanks;  // between the sections: answer if more follows

  std::size_t call_begin = 0;
  std::string loose;  // of a call: text that no argument holds
  ToolArgument argument;
  bool skips_argument = false;  // the call's arguments have the other form already
};

void ReplyParser::Impl::push_text(std::string_view bytes) {
  held += bytes;
  std::size_t begin = 0;
  std::size_t at = 0;
  while ((at = held.find('<', at)) != held.npos) {
    const std::string_view rest = std::string_view(held).substr(at);
    const auto found = std::find_if(kMarkers.begin(), kMarkers.end(),
                                    [&](const auto& m) { return rest.starts_with(m.first); });
    if (found != kMarkers.end()) {
      text(std::string_view(held).substr(begin, at - begin));
      marker(found->second, found->first, true);
      begin = at += found->first.size();
      continue;
    }
    if (std::any_of(kMarkers.begin(), kMarkers.end(),
                    [&](const auto& m) { return m.first.starts_with(rest); })) {
      break;
    }
    ++at;
  }
  const std::size_t end = std::min(at, held.size());
  text(std::string_view(held).substr(begin, end - begin));
  held.erase(0, end);
}

void ReplyParser::Impl::text(std::string_view bytes) {
  if (bytes.empty() || is_finished || section == Section::kDone) return;
  reply.raw += bytes;
  const std::string s = characters.push(bytes);
  if (!s.empty()) head ? head_text(s) : content(s);
}

void ReplyParser::Impl::marker(Marker m, std::string_view spelling, bool is_spelled) {
  if (is_ended || is_finished || (section == Section::kDone && m != Marker::kEnd)) return;
  if (const std::string rest = characters.flush(); !rest.empty()) {
    head ? head_text(rest) : content(rest);
  }
  if (head && m != Marker::kSep) end_head(false);
  const std::size_t begin = reply.raw.size();
  reply.raw += spelling;
  switch (m) {
    case Marker::kOpen:
    case Marker::kClose:
      head = PendingHead{m, is_spelled, begin, {}};
      break;
    case Marker::kSep:
      if (head) {
        end_head(true);
      } else if (is_spelled) {
        content(spelling);
      }
      break;
    case Marker::kEnd:
      end_call(begin);
      section = Section::kDone;
      is_ended = true;
      break;
  }
}

void ReplyParser::Impl::end_of_input() {
  flush_text();
  if (const std::string rest = characters.flush(); !rest.empty()) {
    head ? head_text(rest) : content(rest);
  }
  if (!head) return;
  // An opening tag that broke off opens nothing: a call would have half a name.
  const std::string name = scan_tag(head->text).name;
  const bool closes = head->marker == Marker::kClose && (name.empty() || is_tag(name));
  if (!closes && begins_tag(name)) {
    head.reset();
  } else {
    end_head(false);
  }
}

// Text after <|open|> or <|close|>. Once it can be no tag any more the marker was none.
void ReplyParser::Impl::head_text(std::string_view s) {
  head->text += s;
  const TagHead scanned = scan_tag(head->text);
  if (!scanned.may_go_on) drop_head();
}

void ReplyParser::Impl::drop_head() {
  const PendingHead pending = std::move(*head);
  head.reset();
  const bool is_open = pending.marker == Marker::kOpen;
  std::string_view rest = pending.text;
  if (pending.is_spelled) {
    content(marker_text(pending.marker));
  } else if (const TagHead scanned = scan_tag(rest); is_tag(scanned.name)) {
    // A real marker and a real name: only <|sep|> is missing.
    const std::size_t begins = pending.begin + (is_open ? kMarkers[0] : kMarkers[1]).first.size();
    const Span span{pending.begin, std::min(begins + scanned.n, reply.raw.size())};
    is_open ? open(scanned, span) : close(scanned.name, span);
    rest.remove_prefix(scanned.n);
    // The token that said so may have gone on behind the end of the message.
    if (section == Section::kDone) reply.raw.resize(span.end);
  }
  if (!rest.empty()) content(rest);
}

// At <|sep|>, at another marker, or at the end.
void ReplyParser::Impl::end_head(bool has_sep) {
  const TagHead scanned = scan_tag(head->text);
  const bool is_open = head->marker == Marker::kOpen;
  const bool is_close = !is_open && (scanned.name.empty() || has_sep || is_tag(scanned.name));
  if (is_close ||
      (is_open && scanned.is_whole && (has_sep || is_tag(scanned.name)) && !scanned.name.empty())) {
    const Span span{head->begin, reply.raw.size()};
    head.reset();
    is_open ? open(scanned, span) : close(scanned.name, span);
    return;
  }
  const PendingHead pending = std::move(*head);
  head.reset();
  if (!pending.is_spelled) return;
  content(marker_text(pending.marker));
  content(pending.text);
  if (has_sep) content(marker_text(Marker::kSep));
}

void ReplyParser::Impl::open(const TagHead& tag, Span span) {
  const std::string& name = tag.name;
  if (name == "think" || name == "response" || name == "tools") {
    end_call(span.begin);
    section = name == "think"      ? Section::kThink
              : name == "response" ? Section::kResponse
                                   : Section::kTools;
    has_response = has_response || section == Section::kResponse;
    blanks.clear();
  } else if (name == "call") {
    end_call(span.begin);
    start_call(tag, span.begin);
  } else if ((name == "argument" || name == "json") && in_call()) {
    end_argument();
    name == "json" ? start_json() : start_argument(tag);
  } else if (name == "message") {
    // The reply's own opening, said again, is nothing; anybody else's message ends the reply.
    const std::string* role = tag.find("role");
    if (!role || *role == "assistant") return;
    end_call(span.begin);
    section = Section::kDone;
  }
}

std::string_view ReplyParser::Impl::innermost() const {
  switch (section) {
    case Section::kThink:
      return "think";
    case Section::kResponse:
      return "response";
    case Section::kTools:
      return "tools";
    case Section::kCall:
      return "call";
    case Section::kArgument:
      return "argument";
    case Section::kJson:
      return "json";
    case Section::kMessage:
    case Section::kDone:
      return "message";
  }
  return {};
}

void ReplyParser::Impl::close(std::string_view name, Span span) {
  if (name.empty()) name = innermost();
  if (name == "message") {
    end_call(span.begin);
    section = Section::kDone;
  } else if (name == "tools" && in_tools()) {
    end_call(span.begin);
    section = Section::kMessage;
  } else if (name == "call" && in_call()) {
    end_call(span.end);
  } else if (name == "argument" || name == "json") {
    end_argument();
  } else if ((name == "think" && section == Section::kThink) ||
             (name == "response" &&
              (section == Section::kResponse || section == Section::kThink))) {
    section = Section::kMessage;
  }
}

void ReplyParser::Impl::content(std::string_view s) {
  switch (section) {
    case Section::kMessage:
      return loose_answer(s);
    case Section::kThink:
      return emit(Kind::kReasoning, s);
    case Section::kResponse:
      return emit(Kind::kAnswer, s);
    case Section::kCall:
      loose += s;
      return;
    case Section::kArgument:
      return argument_text(s);
    case Section::kJson:
      return json_text(s);
    case Section::kTools:
    case Section::kDone:
      return;
  }
}

void ReplyParser::Impl::loose_answer(std::string_view s) {
  blanks += s;
  if (is_blank(blanks)) return;
  std::string_view answer = blanks;
  if (reply.answer.empty()) answer.remove_prefix(answer.find_first_not_of(kChatBlanks));
  emit(Kind::kAnswer, answer);
  blanks.clear();
  section = Section::kResponse;
  has_response = true;
}

void ReplyParser::Impl::start_call(const TagHead& tag, std::size_t begin) {
  ParsedCall started;
  if (const std::string* name = tag.find("tool")) started.name = *name;
  started.index = static_cast<int>(reply.tool_calls.size()) + 1;
  if (const std::string* index = tag.find("index")) {
    int value = 0;
    const auto read = std::from_chars(index->data(), index->data() + index->size(), value);
    if (read.ec == std::errc() && read.ptr == index->data() + index->size() && value > 0) {
      started.index = value;
    }
  }
  reply.tool_calls.push_back(std::move(started));
  section = Section::kCall;
  call_begin = begin;
  loose.clear();
  emit(Kind::kCallStart, call().name);
}

void ReplyParser::Impl::end_call(std::size_t end) {
  if (!in_call()) return;
  end_argument();
  if (call().typed.empty() && !call().json_block && !is_blank(loose)) {
    start_json();
    json_text(loose.substr(0, loose.find_last_not_of(kChatBlanks) + 1));
  }
  if (!call().typed.empty()) {
    emit_arguments("}");
  } else if (!call().json_block || is_blank(*call().json_block)) {
    emit_arguments("{}");
  }
  call().is_json = !call().typed.empty() || is_json_object(call().arguments);
  call().complete = true;
  call().raw = reply.raw.substr(call_begin, end - call_begin);
  emit(Kind::kCallEnd, {});
  section = Section::kTools;
}

void ReplyParser::Impl::break_call() {
  if (in_call()) call().raw = reply.raw.substr(call_begin);
}

void ReplyParser::Impl::start_argument(const TagHead& tag) {
  section = Section::kArgument;
  skips_argument = call().json_block.has_value();
  argument = {};
  if (const std::string* key = tag.find("key")) argument.key = *key;
  const std::string* type = tag.find("type");
  argument.type = type ? *type : "string";
  // Only a string can be passed on before its end is known: anything else may turn out to be no
  // JSON.
  if (argument.type != "string" || skips_argument) return;
  std::string begin = call().typed.empty() ? "{\"" : ", \"";
  append_escaped(argument.key, begin);
  emit_arguments(begin + "\": \"");
}

void ReplyParser::Impl::argument_text(std::string_view s) {
  if (skips_argument) return;
  argument.value += s;
  if (argument.type != "string") return;
  std::string escaped;
  append_escaped(s, escaped);
  emit_arguments(escaped);
}

void ReplyParser::Impl::start_json() {
  section = Section::kJson;
  skips_argument = call().json_block.has_value() || !call().typed.empty();
  if (!skips_argument) call().json_block.emplace();
}

void ReplyParser::Impl::json_text(std::string_view s) {
  if (skips_argument) return;
  const bool was_blank = is_blank(*call().json_block);
  *call().json_block += s;
  if (!was_blank) {
    emit_arguments(s);
  } else if (!is_blank(s)) {
    emit_arguments(s.substr(s.find_first_not_of(kChatBlanks)));
  }
}

void ReplyParser::Impl::end_argument() {
  if (section == Section::kArgument && !skips_argument) {
    std::string out;
    if (argument.type == "string") {
      out = '"';
    } else {
      out = call().typed.empty() ? "{\"" : ", \"";
      append_escaped(argument.key, out);
      out += "\": ";
      if (nlohmann::json::accept(argument.value)) {
        out += argument.value;
      } else if (argument.type == "null" && is_blank(argument.value)) {
        out += "null";
      } else {
        out += '"';
        append_escaped(argument.value, out);
        out += '"';
      }
    }
    emit_arguments(out);
    call().typed.push_back(std::move(argument));
  }
  if (in_call()) section = Section::kCall;
}

void ReplyParser::Impl::emit_arguments(std::string_view s) { emit(Kind::kCallArguments, s); }

// The only place where content becomes part of the reply: events and reply cannot differ.
void ReplyParser::Impl::emit(Kind kind, std::string_view s) {
  const bool is_delta =
      kind == Kind::kReasoning || kind == Kind::kAnswer || kind == Kind::kCallArguments;
  if (is_delta && s.empty()) return;
  if (kind == Kind::kReasoning) reply.reasoning += s;
  if (kind == Kind::kAnswer) reply.answer += s;
  if (kind == Kind::kCallArguments) call().arguments += s;
  if (is_delta && !events.empty() && events.back().kind == kind) {
    events.back().text += s;
    return;
  }
  const bool of_call =
      kind == Kind::kCallStart || kind == Kind::kCallArguments || kind == Kind::kCallEnd;
  events.push_back({kind, std::string(s), of_call ? reply.tool_calls.size() - 1 : 0});
}

ReplyParser::ReplyParser(bool thinking) : impl_(std::make_unique<Impl>(thinking)) {}
ReplyParser::~ReplyParser() = default;
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;

std::vector<ReplyEvent> ReplyParser::push(std::string_view bytes, bool is_control) {
  impl_->flush_text();
  if (!is_control) {
    impl_->text(bytes);
  } else if (bytes == "[EOS]") {
    impl_->marker(Marker::kEnd, bytes, false);
  } else {
    const auto found = std::find_if(kMarkers.begin(), kMarkers.end(),
                                    [&](const auto& m) { return m.first == bytes; });
    if (found != kMarkers.end()) {
      impl_->marker(found->second, bytes, false);
    } else if (!done()) {
      impl_->reply.raw += bytes;
    }
  }
  return std::exchange(impl_->events, {});
}

std::vector<ReplyEvent> ReplyParser::push(const Tokenizer& tokenizer, std::int32_t id) {
  return push(tokenizer.bytes(id), tokenizer.is_control(id));
}

std::vector<ReplyEvent> ReplyParser::push_text(std::string_view bytes) {
  impl_->push_text(bytes);
  return std::exchange(impl_->events, {});
}

std::vector<ReplyEvent> ReplyParser::finish(FinishReason why) {
  Impl& p = *impl_;
  if (p.is_finished) return {};
  p.closing = closing();
  p.end_of_input();
  const bool stopped = done() || why == FinishReason::kStop || why == FinishReason::kToolCalls;
  if (stopped) {
    p.end_call(p.reply.raw.size());
    p.reply.finish_reason =
        p.reply.tool_calls.empty() ? FinishReason::kStop : FinishReason::kToolCalls;
  } else {
    p.break_call();
    p.reply.finish_reason = why;
  }
  p.is_finished = true;
  p.emit(Kind::kFinish, finish_reason_name(p.reply.finish_reason));
  return std::exchange(p.events, {});
}

bool ReplyParser::done() const {
  return impl_->is_finished || impl_->section == Impl::Section::kDone;
}
const ParsedReply& ReplyParser::reply() const { return impl_->reply; }

std::vector<TextSegment> ReplyParser::closing() const {
  using Section = Impl::Section;
  if (impl_->is_finished) return impl_->closing;
  std::vector<TextSegment> out;
  Impl p = *impl_;
  const auto tag = [&](std::string_view marker, std::string_view name) {
    out.push_back({std::string(marker), true});
    out.push_back({std::string(name), false});
    out.push_back({"<|sep|>", true});
  };
  const auto close_innermost = [&] {
    const std::string_view name = p.innermost();
    tag("<|close|>", name);
    p.close(name, {p.reply.raw.size(), p.reply.raw.size()});
  };
  if (p.is_ended) return out;
  p.flush_text();
  if (p.head) {
    out.push_back({"<|sep|>", true});
    p.end_head(true);
  }
  while (p.section != Section::kMessage && p.section != Section::kDone) {
    const bool was_tools = p.section == Section::kTools;
    close_innermost();
    p.has_response = p.has_response || was_tools;  // its place is before the tools
  }
  if (p.section == Section::kMessage) {
    if (!p.has_response) {
      tag("<|open|>", "response");
      tag("<|close|>", "response");
    }
    close_innermost();
  }
  out.push_back({"<|end_of_msg|>", true});
  return out;
}

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kToolCalls:
      return "tool_calls";
    case FinishReason::kInterrupted:
      return "interrupted";
  }
  return {};
}

ChatMessage to_message(const ParsedReply& reply) {
  ChatMessage message;
  message.role = Speaker::kAssistant;
  message.reasoning = reply.reasoning;
  if (!reply.answer.empty()) message.content.push_back({reply.answer});
  for (const ParsedCall& call : reply.tool_calls) {
    if (call.complete) message.tool_calls.push_back({{}, call.name, call.typed, call.json_block});
  }
  return message;
}

}  // namespace k3
