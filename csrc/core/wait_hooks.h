#pragma once

#include <functional>
#include <string>

namespace samestep {

/// What the layer above wants to happen while a thread waits. Set once, before any wait.
struct WaitHooks {
  /// Called every few milliseconds of waiting, without locks held; may throw to end the wait (Ctrl-C).
  std::function<void()> interrupt = [] {};
  /// Runs a wait that began where others of the layer above cannot run (Python's lock), so that they can. Called
  /// without locks held; what the wait throws is thrown.
  std::function<void(const std::function<void()>&)> aside = [](const std::function<void()>& wait) { wait(); };
  /// Called once per wait that lasts longer than `warn_after`, with what is waited for.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  double warn_after_s = 30.0;
};

/// The process's hooks.
WaitHooks& wait_hooks();

}  // namespace samestep
