#pragma once

namespace samestep {

/// Notified of `fork`, but not of `vfork`, `posix_spawn` or `exec`.
///
/// The forking thread makes the three calls. Listeners cannot be added or removed between the first call and one of the
/// others. In the child only async-signal-safe functions may be used.
class ForkListener {
 public:
  ForkListener() = default;
  ForkListener(const ForkListener&) = delete;
  ForkListener& operator=(const ForkListener&) = delete;
  virtual ~ForkListener() = default;

  virtual void before_fork() noexcept {}
  virtual void after_fork_in_parent() noexcept {}
  virtual void after_fork_in_child() noexcept = 0;

 protected:
  /// To be called at the end of the constructor and at the beginning of the destructor.
  void register_listener();
  void unregister_listener();
};

}  // namespace samestep
