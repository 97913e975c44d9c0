#pragma once

#include <string>

namespace samestep {

/// Ends this process with `code` after `seconds` and prints `why` to stderr, unless it has ended by then. For a process
/// that is exiting and may hang in a library's exit handler. Uses SIGALRM and the real-time interval timer.
void exit_watchdog(double seconds, int code, const std::string& why);

}  // namespace samestep
