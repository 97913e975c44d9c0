#pragma once

#include <unistd.h>

#include <string_view>
#include <utility>

namespace samestep {

/// Owner of a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  /// Returns the number without closing it.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// Throws UnavailableError with `act`, the text of errno, and its number.
[[noreturn]] void throw_errno(std::string_view act);

/// Returns `fd` unless it is -1; then throws as `throw_errno`.
Fd checked(int fd, std::string_view act);

}  // namespace samestep
