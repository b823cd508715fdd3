#include "apps/terminal.h"

#include <fcntl.h>
#include <histedit.h>
#include <poll.h>
#include <pthread.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <optional>
#include <system_error>
#include <utility>

#include "rank/utf8.h"

namespace k3 {
namespace {

constexpr int kPatience_ms = 250;
constexpr std::size_t kMostWaiting = 1 << 16;  // keys typed ahead
constexpr char kCtrlC = 3;

std::system_error terminal_error(const char* what) {
  return std::system_error(errno ? errno : EIO, std::generic_category(),
                           std::string("the terminal: ") + what);
}

// A process group in the background is stopped when it sets its terminal, and a rank is one of its own under mpirun.
class QuietTtou {
 public:
  QuietTtou() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTTOU);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~QuietTtou() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  QuietTtou(const QuietTtou&) = delete;
  QuietTtou& operator=(const QuietTtou&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

struct Terminal::Impl {
  int screen = -1;
  bool owns_screen = false;
  std::optional<QuietTtou> quiet;
  std::FILE* in = nullptr;  // libedit sets modes through it and never reads it
  std::FILE* out = nullptr;
  termios before{};
  bool begun = false;
  std::function<bool()> stopped;

  EditLine* edit = nullptr;
  History* history = nullptr;
  std::string prompt;

  std::string waiting;  // keys that nobody has read yet
  bool keys_ended = false;
  bool any_key = false;
  // Why the line that is being read ended without a line end.
  bool cancelled = false;
  bool was_stopped = false;

  static Impl& of(EditLine* e) {
    void* data = nullptr;
    el_get(e, EL_CLIENTDATA, &data);
    return *static_cast<Impl*>(data);
  }
  static char* show_prompt(EditLine* e) { return of(e).prompt.data(); }
  static unsigned char on_ctrl_c(EditLine* e, int) {
    of(e).cancelled = true;
    return CC_EOF;
  }
  static int get_char(EditLine* e, wchar_t* c) { return of(e).next_char(*c); }

  // Takes what keys there are; waits at most `patience_ms` for the first.
  void take_keys(int patience_ms) {
    if (keys_ended || waiting.size() >= kMostWaiting) return;
    pollfd keys{STDIN_FILENO, POLLIN, 0};
    if (poll(&keys, 1, patience_ms) <= 0) return;
    std::array<char, 1024> bytes;
    const ssize_t n = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    keys_ended = n <= 0;  // EIO: the terminal is gone
    if (n > 0) waiting.append(bytes.data(), static_cast<std::size_t>(n));
    any_key = any_key || n > 0;
  }

  // 1: a character; 0: no more.
  int next_char(wchar_t& c) {
    for (;;) {
      if (!waiting.empty()) {
        const Utf8Scan scan = utf8_scan(waiting);
        if (scan.kind != Utf8Scan::Kind::kCut || keys_ended) {
          c = scan.kind == Utf8Scan::Kind::kWhole ? static_cast<wchar_t>(scan.code_point) : 0xfffd;
          waiting.erase(0, scan.n);
          return 1;
        }
      }
      if (keys_ended) return 0;
      was_stopped = stopped();
      if (was_stopped) return 0;
      take_keys(kPatience_ms);
    }
  }

  // Keys are bytes, unseen until a line is read.
  void set_mode() {
    termios mode = before;
    mode.c_lflag &= ~static_cast<tcflag_t>(ISIG | ICANON | ECHO);
    mode.c_cc[VMIN] = 1;
    mode.c_cc[VTIME] = 0;
    if (tcsetattr(screen, TCSADRAIN, &mode) != 0) throw terminal_error("cannot be set");
  }

  void start_edit() {
    // What libedit writes goes through the locale. K3's text is UTF-8 whatever the environment says.
    std::setlocale(LC_CTYPE, "C.UTF-8");
    edit = el_init("k3run", in, out, out);
    history = history_init();
    if (!edit || !history) throw terminal_error("libedit does not start");
    HistEvent event;
    ::history(history, &event, H_SETSIZE, 1000);
    ::history(history, &event, H_SETUNIQUE, 1);
    el_set(edit, EL_CLIENTDATA, this);
    el_set(edit, EL_EDITOR, "emacs");
    el_set(edit, EL_SIGNAL, 0);
    el_set(edit, EL_HIST, ::history, history);
    el_set(edit, EL_PROMPT, &Impl::show_prompt);
    el_set(edit, EL_GETCFN, &Impl::get_char);
    // Between two lines (-x) as well: what is typed there is for the next line, and shown with it.
    el_set(edit, EL_SETTY, "-d", "-isig", nullptr);
    el_set(edit, EL_SETTY, "-q", "-isig", nullptr);
    el_set(edit, EL_SETTY, "-x", "-isig", "-icanon", "-echo", nullptr);
    el_set(edit, EL_ADDFN, "k3-cancel", "Drops the line", &Impl::on_ctrl_c);
    el_set(edit, EL_BIND, "^C", "k3-cancel", nullptr);
    el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
  }
};

Terminal::Terminal() : impl_(std::make_unique<Impl>()) {
  Impl& t = *impl_;
  errno = 0;
  if (isatty(STDIN_FILENO) == 1) {
    t.screen = STDIN_FILENO;
  } else {
    t.screen = ::open("/dev/tty", O_RDWR | O_CLOEXEC | O_NOCTTY);
    t.owns_screen = t.screen >= 0;
  }
  if (t.screen < 0 || tcgetattr(t.screen, &t.before) != 0) {
    throw std::system_error(
        errno ? errno : ENOTTY, std::generic_category(),
        "--interactive: rank 0 has no terminal: start mpirun in one, on rank 0's host");
  }
  if (!t.owns_screen) return;  // the shell's job control is in force
  const pid_t launcher = getpgid(getppid());
  const pid_t foreground = tcgetpgrp(t.screen);
  if (launcher != getpgrp() && launcher != foreground && getpgrp() != foreground) {
    throw std::system_error(ENOTTY, std::generic_category(),
                            "--interactive: the job runs in the background of its terminal");
  }
  t.quiet.emplace();
}

Terminal::~Terminal() {
  Impl& t = *impl_;
  if (t.history) history_end(t.history);
  if (t.edit) el_end(t.edit);
  if (t.begun) tcsetattr(t.screen, TCSADRAIN, &t.before);
  if (t.in) std::fclose(t.in);
  if (t.out) std::fclose(t.out);
  if (t.owns_screen) ::close(t.screen);
}

void Terminal::take_notes() {
  // A terminal's own standard error may have been sent to a file: that stays.
  if (!impl_->owns_screen) return;
  std::fflush(stderr);
  if (::dup2(impl_->screen, STDERR_FILENO) < 0) throw terminal_error("standard error");
}

void Terminal::begin(std::function<bool()> stopped) {
  Impl& t = *impl_;
  t.stopped = std::move(stopped);
  t.begun = true;
  const auto stream = [&](const char* mode) {
    const int copy = ::fcntl(t.screen, F_DUPFD_CLOEXEC, 3);
    std::FILE* f = copy < 0 ? nullptr : ::fdopen(copy, mode);
    if (!f) throw terminal_error("cannot be opened");
    return f;
  };
  t.in = stream("r");
  t.out = stream("w");
  t.start_edit();  // takes the terminal as it is for the way it was
  t.set_mode();
}

Terminal::Line Terminal::read_line(const std::string& prompt) {
  Impl& t = *impl_;
  t.prompt = prompt;
  t.cancelled = t.was_stopped = false;
  el_resize(t.edit);
  int n = 0;
  const char* typed = el_gets(t.edit, &n);
  std::string text = typed && n > 0 ? std::string(typed, static_cast<std::size_t>(n)) : "";
  const bool whole = !text.empty() && (text.back() == '\n' || text.back() == '\r');
  if (whole) {
    text.pop_back();
    if (text.find_first_not_of(" \t") != std::string::npos) {
      HistEvent event;
      ::history(t.history, &event, H_ENTER, text.c_str());
    }
    return {Line::Kind::kText, text};
  }
  if (t.was_stopped) return {Line::Kind::kStopped, ""};
  if (t.cancelled) {
    const LineInfo* left = el_line(t.edit);
    return {Line::Kind::kCancelled, std::string(left->buffer, left->lastchar)};
  }
  if (!t.any_key) {
    throw std::system_error(
        EIO, std::generic_category(),
        "--interactive: no key came: standard input is at its end (mpirun --stdin none?)");
  }
  return {Line::Kind::kEnd, ""};
}

bool Terminal::interrupted() {
  Impl& t = *impl_;
  t.take_keys(0);
  const std::size_t at = t.waiting.rfind(kCtrlC);
  if (at == std::string::npos) return false;
  t.waiting.erase(0, at + 1);
  return true;
}

void Terminal::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(impl_->screen, text.data(), text.size());
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) {
      if (errno == EAGAIN) {
        pollfd p{impl_->screen, POLLOUT, 0};
        poll(&p, 1, kPatience_ms);
      }
      continue;
    }
    if (n < 0) throw terminal_error("write");
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

}  // namespace k3
