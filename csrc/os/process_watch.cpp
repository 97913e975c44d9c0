#include "os/process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace samestep {
namespace {

struct Stat {
  char state;
  std::uint64_t start_time;
};

/// Nothing if there is no such process, or /proc cannot be read.
std::optional<Stat> read_stat(pid_t pid) {
  std::array<char, 32> path;
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", static_cast<int>(pid));
  const Fd fd(::open(path.data(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> text{};
  if (!fd || ::read(fd.get(), text.data(), text.size() - 1) <= 0) return {};
  const char* at = std::strrchr(text.data(), ')');  // the name before it may contain any characters
  if (at == nullptr || at[1] == '\0') return {};
  at += 2;
  const char state = *at;
  constexpr int kFieldsToStart = 19;  // from the state, which is field 3, to field 22
  for (int i = 0; i < kFieldsToStart && at != nullptr; ++i) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return {};
  return Stat{state, std::strtoull(at, nullptr, 10)};
}

}  // namespace

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid) {
  if (pid <= 0) return;
#ifdef SYS_pidfd_open
  // By number, because the C library has a function for it only from glibc 2.36 on.
  fd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  if (const auto stat = fd_ ? std::nullopt : read_stat(pid)) start_time_ = stat->start_time;
}

bool ProcessWatch::ended() const {
  if (fd_) {
    // A pidfd becomes readable when its process ends, also while the process is a zombie (pidfd_open(2)).
    pollfd entry{fd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
  }
  if (pid_ <= 0) return false;
  const auto stat = start_time_ != 0 ? read_stat(pid_) : std::nullopt;
  // The number alone is no proof: it may belong to a new process, which then has another start time.
  if (stat) return stat->state == 'Z' || stat->state == 'X' || stat->start_time != start_time_;
  return ::kill(pid_, 0) != 0 && errno == ESRCH;
}

}  // namespace samestep
