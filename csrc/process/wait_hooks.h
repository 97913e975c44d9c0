#pragma once

#include <atomic>
#include <functional>
#include <string>

namespace samestep {

/// Callbacks of the layer above while a thread waits. The functions are set once, before any wait.
struct WaitHooks {
  /// Called every few milliseconds of a wait, without locks held; may throw to end the wait (Ctrl-C).
  std::function<void()> interrupt = [] {};
  /// Runs `wait` while other threads of the layer above can run (releases Python's lock). Called without locks held;
  /// propagates what the wait throws.
  std::function<void(const std::function<void()>&)> run_without_gil = [](const std::function<void()>& wait) { wait(); };
  /// Called once per wait that exceeds `warn_after`, with a description of what is missing.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  std::atomic<double> warn_after_s = 30.0;  ///< relaxed: publishes no other data
};

/// The process's hooks.
WaitHooks& wait_hooks();

}  // namespace samestep
