// A program on a terminal of its own, driven as a person would: keys in, screen out.
#pragma once

#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace k3::test {

class OnTerminal {
 public:
  // Far more than a busy machine needs: only a program that hangs takes it.
  static constexpr std::chrono::seconds kPatience{150};

  explicit OnTerminal(std::vector<std::string> command) {
    std::vector<char*> argv;
    for (std::string& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    winsize size{50, 200, 0, 0};
    pid_ = forkpty(&fd_, nullptr, nullptr, &size);
    if (pid_ < 0) throw std::runtime_error("forkpty failed");
    if (pid_ == 0) {
      execv(argv[0], argv.data());
      _exit(127);
    }
    tcgetattr(fd_, &before_);
  }
  ~OnTerminal() {
    if (pid_ > 0) {
      kill(pid_, SIGTERM);
      for (int i = 0; i < 50 && waitpid(pid_, nullptr, WNOHANG) == 0; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
      kill(pid_, SIGKILL);  // does nothing to one that has been waited for
      waitpid(pid_, nullptr, 0);
    }
    ::close(fd_);
  }
  OnTerminal(const OnTerminal&) = delete;
  OnTerminal& operator=(const OnTerminal&) = delete;

  void type(const std::string& keys) {
    if (::write(fd_, keys.data(), keys.size()) != static_cast<ssize_t>(keys.size())) {
      throw std::runtime_error("the terminal takes no keys; it shows:\n" + screen_);
    }
  }
  // What came since the last call, up to and with `text`.
  std::string until(const std::string& text) {
    return wait_for(
        [&] {
          const std::size_t at = screen_.find(text, seen_);
          return at == std::string::npos ? std::string::npos : at + text.size();
        },
        "'" + text + "'");
  }
  // `n` more bytes.
  std::string more(std::size_t n) {
    return wait_for([&] { return screen_.size() < seen_ + n ? std::string::npos : seen_ + n; },
                    std::to_string(n) + " more bytes");
  }
  // The exit code; -1: it did not exit by itself.
  int wait_exit() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    int status = 0;
    while (std::chrono::steady_clock::now() < deadline) {
      take(20);
      if (waitpid(pid_, &status, WNOHANG) != pid_) continue;
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    return -1;
  }
  void signal(int number) { kill(pid_, number); }
  // The terminal's modes are those it began with.
  bool is_restored() const {
    termios now{};
    tcgetattr(fd_, &now);
    return now.c_lflag == before_.c_lflag && now.c_iflag == before_.c_iflag &&
           now.c_oflag == before_.c_oflag;
  }
  const std::string& screen() const { return screen_; }

 private:
  // False: there is nothing left to come.
  bool take(int patience_ms) {
    pollfd p{fd_, POLLIN, 0};
    if (poll(&p, 1, patience_ms) <= 0) return true;
    std::array<char, 4096> bytes;
    const ssize_t n = ::read(fd_, bytes.data(), bytes.size());
    if (n > 0) screen_.append(bytes.data(), static_cast<std::size_t>(n));
    return n > 0;
  }
  template <class Find>
  std::string wait_for(const Find& find, const std::string& what) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      const std::size_t end = find();
      if (end != std::string::npos) {
        const std::string out = screen_.substr(seen_, end - seen_);
        seen_ = end;
        return out;
      }
      if (std::chrono::steady_clock::now() > deadline || !take(100)) {
        throw std::runtime_error("waited in vain for " + what + "; the terminal shows:\n" +
                                 screen_);
      }
    }
  }

  pid_t pid_ = -1;
  int fd_ = -1;
  termios before_{};
  std::string screen_;
  std::size_t seen_ = 0;
};

}  // namespace k3::test
