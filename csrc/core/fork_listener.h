#pragma once

namespace samestep {

/// What has to be told of `fork`. Not of `vfork`, `posix_spawn` or `exec`.
///
/// The three calls come from the thread that forks. Between the first and one of the others no listener can come or
/// go. In the child only what a signal handler may do is safe.
class ForkListener {
 public:
  ForkListener() = default;
  ForkListener(const ForkListener&) = delete;
  ForkListener& operator=(const ForkListener&) = delete;
  virtual ~ForkListener() = default;

  virtual void before_fork() noexcept = 0;
  virtual void after_fork_in_parent() noexcept = 0;
  virtual void after_fork_in_child() noexcept = 0;

 protected:
  /// To be called at the end of the constructor, and at the beginning of the destructor.
  void listen();
  void stop_listening();
};

}  // namespace samestep
