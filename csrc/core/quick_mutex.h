#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace samestep {

/// A recursive mutex for sections that are short and hardly ever contended. Its holder leaves by a plain store:
/// std::recursive_mutex ends with an exchange, which waits until all stores before it are visible to other CPUs, 15 ns
/// and more of a call that takes 200.
class QuickMutex {
 public:
  QuickMutex() = default;
  QuickMutex(const QuickMutex&) = delete;
  QuickMutex& operator=(const QuickMutex&) = delete;

  void lock() {
    const std::uintptr_t me = this_thread();
    if (!take(me)) wait(me);
    ++depth_;
  }
  bool try_lock() {
    if (!take(this_thread())) return false;
    ++depth_;
    return true;
  }
  /// In a process made by fork: the thread that was inside, if any was, does not exist here.
  void forget_threads() {
    depth_ = 0;
    owner_.store(0, std::memory_order_relaxed);
    n_waiting_.store(0, std::memory_order_relaxed);
  }
  void unlock() {
    if (--depth_ != 0) return;
    owner_.store(0, std::memory_order_release);
    if (n_waiting_.load(std::memory_order_relaxed) != 0) let_others();
  }

 private:
  static std::uintptr_t this_thread() { return static_cast<std::uintptr_t>(::pthread_self()); }  // never 0 on Linux
  bool take(std::uintptr_t me) {
    std::uintptr_t owner = owner_.load(std::memory_order_relaxed);
    return owner == me || (owner == 0 && owner_.compare_exchange_strong(owner, me, std::memory_order_acquire,
                                                                        std::memory_order_relaxed));
  }
  void wait(std::uintptr_t me);
  void let_others();

  std::atomic<std::uintptr_t> owner_{0};
  std::uint32_t depth_ = 0;  // the owner's
  std::atomic<std::uint32_t> n_waiting_{0};
};

}  // namespace samestep
