#pragma once

#include "process/progress_source.h"
#include "process/wait_hooks.h"
#include "waiting/backoff.h"

namespace samestep {

/// Waits until `ready()` for something outside of this rank's groups. About every millisecond it looks for signals,
/// lets the groups make progress, since peers may wait for this rank there, and calls `look` with the time waited so
/// far. Throws what these throw. To be called without locks.
template <class Ready, class Look>
void await(Ready ready, Look look) {
  Backoff pause(/*oversubscribed=*/true);
  while (!ready()) {
    if (!pause.step()) continue;
    wait_hooks().interrupt();
    progress_all();
    look(pause.waited());
  }
}

/// Waits for a moment, and looks at nothing else. False if `ready()` is not true by `deadline`.
template <class Ready>
bool await_until(const Deadline& deadline, Ready ready) {
  Backoff pause(/*oversubscribed=*/true);
  while (!ready()) {
    if (deadline.passed()) return false;
    pause.step();
  }
  return true;
}

}  // namespace samestep
