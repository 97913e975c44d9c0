#pragma once

#include <sys/types.h>

#include <cstdint>

#include "os/fd.h"

namespace samestep {

/// Reports when a process has ended, including zombies, and detects reused process numbers. If the kernel offers no
/// pidfd (before Linux 5.3, or under a seccomp filter), or the program has closed it, each query reads /proc.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  /// Watches nothing if `pid` is 0.
  explicit ProcessWatch(pid_t pid);
  ProcessWatch(ProcessWatch&&) = default;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ~ProcessWatch() { release_if_taken(); }

  bool ended() const;
  /// Whether all threads of the process are stopped, as by SIGSTOP or a debugger: none is in a system call. False also
  /// if that is unknown.
  bool is_stopped() const;
  /// Whether the kernel notifies through a pidfd.
  bool has_pidfd() const { return static_cast<bool>(fd_); }

 private:
  /// Whether the number still is that of the pidfd: programs close descriptors that they do not know.
  bool holds_pidfd() const;
  /// Leaves the number alone if it is the program's now.
  void release_if_taken();
  bool runs() const;

  Fd fd_;
  std::uint64_t device_ = 0, inode_ = 0;  // of the pidfd
  pid_t pid_ = 0;
  std::uint64_t start_time_ = 0;  // of the process, in ticks since the kernel began; 0 = unknown
};

}  // namespace samestep
