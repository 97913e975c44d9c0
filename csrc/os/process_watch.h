#pragma once

#include <sys/types.h>

#include "os/fd.h"

namespace samestep {

/// Tells when a process has ended, a zombie included, and is not fooled by a number that is used again.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  /// Watches nothing where `pid` is 0 or the kernel knows no pidfd (before Linux 5.3).
  explicit ProcessWatch(pid_t pid);

  bool ended() const;

 private:
  Fd fd_;
};

}  // namespace samestep
