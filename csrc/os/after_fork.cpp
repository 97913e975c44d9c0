#include "os/after_fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace samestep {
namespace {

// Neither is ever destroyed: the handlers of fork stay registered until the process ends.
std::mutex& guard() {
  static auto& mutex = *new std::mutex;
  return mutex;
}
std::vector<int>& connections() {
  static auto& all = *new std::vector<int>;
  return all;
}

// The forking thread holds the mutex during the fork, so that the child does not inherit a list that another thread was
// changing.
void before() { guard().lock(); }
void in_parent() { guard().unlock(); }
void in_child() {
  // Only async-signal-safe functions: other threads of the parent may have held any lock, that of the allocator among
  // them. `clear` frees nothing.
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  for (const int fd : connections()) {
    if (nothing >= 0) ::dup3(nothing, fd, O_CLOEXEC);  // not closed: the number could be reused
  }
  if (nothing >= 0) ::close(nothing);
  connections().clear();
  guard().unlock();
}

}  // namespace

void close_in_forks(int fd) {
  static const int registered = ::pthread_atfork(before, in_parent, in_child);
  (void)registered;
  const std::lock_guard lock(guard());
  connections().push_back(fd);
}

void forget_in_forks(int fd) {
  const std::lock_guard lock(guard());
  std::erase(connections(), fd);
}

}  // namespace samestep
