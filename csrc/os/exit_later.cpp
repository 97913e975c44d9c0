#include "os/exit_later.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace samestep {
namespace {

int exit_code = 1;
std::string last_words;

void exit_now(int) {  // only what a signal handler may call
  const ssize_t written = ::write(2, last_words.data(), last_words.size());
  (void)written;
  ::_exit(exit_code);
}

}  // namespace

void exit_later(double seconds, int code, const std::string& why) {
  exit_code = code;
  last_words = why + "\n";
  struct sigaction action{};
  action.sa_handler = &exit_now;
  ::sigaction(SIGALRM, &action, nullptr);
  const double bounded = std::clamp(seconds, 1e-3, 1e8);
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(bounded);
  timer.it_value.tv_usec = static_cast<suseconds_t>((bounded - std::floor(bounded)) * 1e6);
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace samestep
