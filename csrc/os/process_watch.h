#pragma once

#include <sys/types.h>

#include <cstdint>

#include "os/fd.h"

namespace samestep {

/// Reports when a process has ended, including zombies, and detects reused process numbers. If the kernel offers no
/// pidfd (before Linux 5.3, or under a seccomp filter), each query reads /proc.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  /// Watches nothing if `pid` is 0.
  explicit ProcessWatch(pid_t pid);

  bool ended() const;
  /// Whether the kernel notifies through a pidfd.
  bool has_pidfd() const { return static_cast<bool>(fd_); }

 private:
  Fd fd_;
  pid_t pid_ = 0;
  std::uint64_t start_time_ = 0;  // of the process, in ticks since the kernel began; 0 = unknown
};

}  // namespace samestep
