#pragma once

#include <string>

namespace samestep {

/// Ends this process with `code` after `seconds`, unless it has ended by then; prints `why` to stderr. For a
/// process that is leaving and may be held up in a library's exit handler. Uses SIGALRM and the real-time
/// interval timer.
void exit_later(double seconds, int code, const std::string& why);

}  // namespace samestep
