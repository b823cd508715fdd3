#include "apps/interactive.h"

#include <utility>

#include <fmt/core.h>

#include "apps/launch_main.h"
#include "apps/reply_text.h"

namespace k3 {

const char* const kInteractiveHelp =
    "  /reset   a new conversation; system messages and tools stay\n"
    "  /quit    ends; Ctrl-D, or Ctrl-C twice on an empty line, does too\n"
    "  /help    this list\n"
    "  Ctrl-C stops a reply, or drops the line. A line that ends in \\ goes on in the next; a "
    "blank\n"
    "  in front makes a message of what begins with /. The arrows go through earlier lines.\n";

namespace {

class Talk {
 public:
  Talk(Engine& engine, const Tokenizer& tokenizer, RunLog* log, ChatRequest start,
       Terminal& terminal, const InteractiveOptions& options)
      : engine_(engine),
        tokenizer_(tokenizer),
        log_(log),
        terminal_(terminal),
        options_(options),
        generator_(engine, tokenizer, log),
        chat_(tokenizer, std::move(start)) {}

  InteractiveEnd run() {
    terminal_.begin([this] { return job_stops(); });
    say(fmt::format("{} positions of context; /help lists the commands\n", engine_.config().n_ctx));
    if (chat_.waits_for_reply()) reply(chat_.n_message());
    while (end_.reason.empty()) {
      if (job_stops()) {
        end_.reason = "interrupted";
      } else {
        one_line();
      }
    }
    return end_;
  }

 private:
  bool job_stops() const { return stop_asked() || engine_.stop_requested(); }
  void say(const std::string& line) { terminal_.write(line); }

  void one_line() {
    const std::vector<ToolCall> calls = chat_.calls_waiting();
    const std::string prompt = !text_.empty()  ? ". "
                               : calls.empty() ? "> "
                                               : for_terminal(calls[0].name) + " result> ";
    const Terminal::Line line = terminal_.read_line(prompt);
    switch (line.kind) {
      case Terminal::Line::Kind::kEnd:
        say("\n");
        end_.reason = "quit";
        return;
      case Terminal::Line::Kind::kStopped:
        say("\n");
        end_.reason = "interrupted";
        return;
      case Terminal::Line::Kind::kCancelled:
        return cancelled(line.text);
      case Terminal::Line::Kind::kText:
        break;
    }
    asked_to_end_ = false;
    if (!line.text.empty() && line.text.back() == '\\') {
      text_ += line.text.substr(0, line.text.size() - 1) + "\n";
      return;
    }
    const std::string text = std::exchange(text_, {}) + line.text;
    if (text.find_first_not_of(" \t\n") == std::string::npos) return;
    text[0] == '/' ? command(text) : message(text, calls);
  }

  void cancelled(const std::string& line) {
    say("^C\n");
    if (!line.empty() || !text_.empty()) {
      text_.clear();
      asked_to_end_ = false;
    } else if (asked_to_end_) {
      end_.reason = "quit";
    } else {
      asked_to_end_ = true;
      say("(Ctrl-C again, Ctrl-D or /quit ends)\n");
    }
  }

  void command(const std::string& text) {
    const std::string name = text.substr(0, text.find_first_of(" \t\n"));
    if (name == "/quit") {
      end_.reason = "quit";
    } else if (name == "/reset") {
      chat_.clear();
      say("(a new conversation)\n");
    } else if (name == "/help") {
      say(kInteractiveHelp);
    } else {
      say(fmt::format("{}: no such command; /help lists them\n", for_terminal(name)));
    }
  }

  void message(const std::string& text, const std::vector<ToolCall>& calls) {
    const std::size_t before = chat_.n_message();
    if (calls.empty()) {
      // One blank in front is the way to say what begins with a slash.
      chat_.say(text[0] == ' ' && text.size() > 1 && text[1] == '/' ? text.substr(1) : text);
    } else {
      chat_.say_result(calls[0], text);
      if (calls.size() > 1) return;  // a result for each call first
    }
    reply(before);
  }

  // The slot as the next reply needs it; false: there is no room, and the messages from `before` on are taken back.
  bool make_room(const Conversation::Input& input, std::size_t before) {
    const std::int64_t n_ctx = engine_.config().n_ctx;
    const std::int64_t held = input.reset ? 0 : engine_.length(0);
    const auto n = std::ssize(input.ids);
    if (held + n > n_ctx) {
      say(
          fmt::format("(the context is full: {} of {} positions are taken, this needs {}; /reset "
                      "begins anew)\n",
                      held, n_ctx, n));
      chat_.take_back(before, false);
      return false;
    }
    if (input.reset) engine_.reset(0);
    return true;
  }

  void reply(std::size_t before) {
    const Conversation::Input input = chat_.input();
    if (!make_room(input, before)) return;
    if (log_) {
      log_->prompt(std::span(input.ids).last(input.n_fresh));
    }
    ReplyParser parser(chat_.thinking());
    ReplyText text;
    bool counts = true;
    GenerationOptions options{options_.n_predict, false, static_cast<std::uint64_t>(end_.n_token)};
    bool stopped = false;
    const Generation g = generator_.run(
        input.ids, options,
        [&](const Decision& d, bool ends) {
          counts = belongs_to_reply(parser, tokenizer_, d.id, ends);
          if (counts) say(for_terminal(text.push(parser.push(tokenizer_, d.id))));
          return counts;
        },
        [&](const Progress& p) { show_prefill(p); },
        [&] { return stopped = stopped || terminal_.interrupted() || job_stops(); });
    ++end_.n_turn;
    end_.n_prompt += static_cast<std::int64_t>(input.n_fresh);
    end_.n_token += std::ssize(g.ids);
    if (!g.prompt_read) {
      chat_.take_back(before, true);
      say("\n(stopped before the message was read: it does not count)\n");
      if (log_) log_->reply(0, "interrupted");
      return;
    }
    std::string rest = text.push(parser.finish(finish_reason(g.ending)));
    rest += text.end();
    say(for_terminal(rest));
    chat_.replied(parser, g.ids, counts);
    say(ending_line(g, parser.reply()));
    if (log_) {
      log_->reply(std::ssize(g.ids), std::string(finish_reason_name(parser.reply().finish_reason)));
    }
  }

  // A long prompt shows that it is being read.
  void show_prefill(const Progress& p) {
    if (p.seconds < 1 && !prefill_shown_) return;
    prefill_shown_ = p.done < p.total;
    say(prefill_shown_ ? fmt::format("\rreading: {} of {} tokens", p.done, p.total) : "\r\033[K");
  }

  std::string ending_line(const Generation& g, const ParsedReply& reply) const {
    std::string out = fmt::format("({} tokens", g.ids.size());
    if (g.n_later() > 0 && g.later_s > 0) {
      out += fmt::format(", {:.1f} tok/s", static_cast<double>(g.n_later()) / g.later_s);
    }
    out += fmt::format(", {} of {} positions", engine_.length(0), engine_.config().n_ctx);
    if (g.ending == Generation::Ending::kContextFull) {
      out += "; the context is full, /reset begins anew";
    } else if (reply.finish_reason == FinishReason::kLength) {
      out += "; cut off by --predict";
    } else if (reply.finish_reason == FinishReason::kInterrupted) {
      out += "; stopped";
    }
    return out + ")\n";
  }

  Engine& engine_;
  const Tokenizer& tokenizer_;
  RunLog* log_;
  Terminal& terminal_;
  InteractiveOptions options_;
  Generator generator_;
  Conversation chat_;
  InteractiveEnd end_;
  std::string text_;           // lines that end in a backslash so far
  bool asked_to_end_ = false;  // the last thing typed was Ctrl-C on an empty line
  bool prefill_shown_ = false;
};

}  // namespace

InteractiveEnd talk(Engine& engine, const Tokenizer& tokenizer, RunLog* log, ChatRequest start,
                    Terminal& terminal, const InteractiveOptions& options) {
  return Talk(engine, tokenizer, log, std::move(start), terminal, options).run();
}

}  // namespace k3
