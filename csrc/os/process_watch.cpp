#include "os/process_watch.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace samestep {
namespace {

struct Stat {
  char state;
  std::uint64_t start_time;
};

/// Nothing if there is no such process, or /proc cannot be read.
std::optional<Stat> read_stat(const std::string& folder) {
  const Fd fd(::open((folder + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
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

std::string folder_of(pid_t pid) { return "/proc/" + std::to_string(pid); }

}  // namespace

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid) {
  if (pid <= 0) return;
#ifdef SYS_pidfd_open
  // By number, because the C library has a function for it only from glibc 2.36 on.
  fd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
  struct stat found{};
  if (fd_ && ::fstat(fd_.get(), &found) == 0) {
    device_ = found.st_dev;
    inode_ = found.st_ino;
  }
  if (const auto stat = read_stat(folder_of(pid))) start_time_ = stat->start_time;
}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  std::swap(pid_, other.pid_);
  std::swap(start_time_, other.start_time_);
  return *this;
}

bool ProcessWatch::holds_pidfd() const {
  struct stat found{};
  return fd_ && ::fstat(fd_.get(), &found) == 0 && found.st_dev == device_ && found.st_ino == inode_;
}

void ProcessWatch::release_if_taken() {
  if (fd_ && !holds_pidfd()) fd_.release();
}

/// False also if that is unknown.
bool ProcessWatch::runs() const {
  const auto stat = start_time_ != 0 ? read_stat(folder_of(pid_)) : std::nullopt;
  // The number alone is no proof: it may belong to a new process, which then has another start time.
  return stat && stat->state != 'Z' && stat->state != 'X' && stat->start_time == start_time_;
}

bool ProcessWatch::ended() const {
  if (holds_pidfd()) {
    // A pidfd becomes readable when its process ends, also while the process is a zombie (pidfd_open(2)). Before Linux
    // 6.9 other descriptors may have its inode, so a process that runs has not ended.
    pollfd entry{fd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0 && !runs();
  }
  if (pid_ <= 0 || runs()) return false;
  if (start_time_ != 0 && read_stat(folder_of(pid_))) return true;
  return ::kill(pid_, 0) != 0 && errno == ESRCH;
}

bool ProcessWatch::is_stopped() const {
  if (pid_ <= 0) return false;
  const std::string folder = folder_of(pid_) + "/task/";
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir(folder.c_str()), &::closedir);
  if (threads == nullptr) return false;
  while (const dirent* entry = ::readdir(threads.get())) {
    if (entry->d_name[0] == '.') continue;
    const auto stat = read_stat(folder + entry->d_name);
    if (stat && stat->state != 'T' && stat->state != 't' && stat->state != 'Z' && stat->state != 'X') return false;
  }
  return true;
}

}  // namespace samestep
