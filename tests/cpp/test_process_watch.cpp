#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "os/process_watch.h"

using samestep::ProcessWatch;

namespace {

/// A process that waits until it is ended.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      ::pause();
      ::_exit(0);
    }
    REQUIRE(pid_ > 0);
  }
  ~Child() { end(); }
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_;
};

/// The number of the only pidfd of this process.
int pidfd_number() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.find("pidfd") != std::string::npos) return std::stoi(entry.path().filename().string());
  }
  return -1;
}

}  // namespace

TEST_CASE("process watch: a process has ended once it has, not before") {
  Child child;
  const ProcessWatch watch(child.pid());
  CHECK_FALSE(watch.ended());
  child.end();
  CHECK(watch.ended());
}

TEST_CASE("process watch: a pidfd that the program has closed makes nobody dead, and hides no death") {
  Child child;
  const ProcessWatch watch(child.pid());
  const int number = pidfd_number();
  if (number < 0) return;  // the kernel has none
  ::close(number);
  CHECK_FALSE(watch.ended());
  child.end();
  CHECK(watch.ended());
}

TEST_CASE("process watch: what has got the number of the pidfd is not asked, and stays open") {
  Child child;
  int number = -1;
  {
    const ProcessWatch watch(child.pid());
    number = pidfd_number();
    if (number < 0) return;
    const samestep::Fd readable(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
    REQUIRE(::dup2(readable.get(), number) == number);
    CHECK_FALSE(watch.ended());
    child.end();
    CHECK(watch.ended());
  }
  CHECK(::close(number) == 0);
}

TEST_CASE("process watch: a stopped process is stopped until it goes on") {
  Child child;
  const ProcessWatch watch(child.pid());
  CHECK_FALSE(watch.is_stopped());
  ::kill(child.pid(), SIGSTOP);
  REQUIRE(::waitpid(child.pid(), nullptr, WUNTRACED) == child.pid());
  CHECK(watch.is_stopped());
  CHECK_FALSE(watch.ended());
  ::kill(child.pid(), SIGCONT);
  REQUIRE(::waitpid(child.pid(), nullptr, WCONTINUED) == child.pid());
  CHECK_FALSE(watch.is_stopped());
  CHECK_FALSE(ProcessWatch(0).is_stopped());
}
