#include "os/after_fork.h"

#include <fcntl.h>
#include <unistd.h>

#include <mutex>
#include <vector>

#include "process/fork_listener.h"

namespace samestep {
namespace {

class Connections final : ForkListener {
 public:
  Connections() { register_listener(); }
  void add(int fd) {
    const std::lock_guard lock(mutex_);
    all_.push_back(fd);
  }
  void remove(int fd) {
    const std::lock_guard lock(mutex_);
    std::erase(all_, fd);
  }

 private:
  // The forking thread holds the mutex during the fork, so that the child does not inherit a list that another thread
  // was changing.
  void before_fork() noexcept override { mutex_.lock(); }
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override {
    // Only async-signal-safe functions: other threads of the parent may have held any lock, that of the allocator among
    // them. `clear` frees nothing.
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (const int fd : all_) {
      if (nothing >= 0) ::dup3(nothing, fd, O_CLOEXEC);  // not closed: the number could be reused
    }
    if (nothing >= 0) ::close(nothing);
    all_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<int> all_;
};

Connections& connections() {
  static auto& all = *new Connections;  // never destroyed: the process may fork until it ends
  return all;
}

}  // namespace

void close_in_forks(int fd) { connections().add(fd); }
void forget_in_forks(int fd) { connections().remove(fd); }

}  // namespace samestep
