#include "os/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>

namespace samestep {

ProcessWatch::ProcessWatch(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid > 0) fd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  (void)pid;
#endif
}

bool ProcessWatch::ended() const {
  if (!fd_) return false;
  pollfd entry{fd_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace samestep
