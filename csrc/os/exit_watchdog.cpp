#include "os/exit_watchdog.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace samestep {
namespace {

int exit_code = 1;
// Set before the handler is installed: a handler must not allocate memory.
std::string final_message;

void exit_now(int) {  // async-signal-safe functions only
  const ssize_t written = ::write(2, final_message.data(), final_message.size());
  (void)written;
  ::_exit(exit_code);
}

}  // namespace

void exit_watchdog(double seconds, int code, const std::string& why) {
  const itimerval off{};
  ::setitimer(ITIMER_REAL, &off, nullptr);  // the handler of an earlier call must not read a text that changes
  exit_code = code;
  final_message = why + "\n";
  struct sigaction action{};
  action.sa_handler = &exit_now;
  ::sigaction(SIGALRM, &action, nullptr);
  // Not 0, which would stop the timer instead.
  const double bounded = std::clamp(seconds, 1e-3, 1e8);
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(bounded);
  timer.it_value.tv_usec = static_cast<suseconds_t>((bounded - std::floor(bounded)) * 1e6);
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace samestep
