#include "core/quick_mutex.h"

#include <sched.h>

#include <chrono>
#include <thread>

namespace samestep {

void QuickMutex::wait(std::uintptr_t me) {
  constexpr int kYields = 64;  // some 50 us, longer than most sections, between sleeps
  constexpr std::chrono::microseconds kSleep{20};
  struct Waiting {
    std::atomic<std::uint32_t>& n;
    explicit Waiting(std::atomic<std::uint32_t>& waiting) : n(waiting) { n.fetch_add(1, std::memory_order_relaxed); }
    ~Waiting() { n.fetch_sub(1, std::memory_order_relaxed); }
  } const waiting(n_waiting_);
  for (int i = 1; !take(me); ++i) {
    if (i % kYields != 0) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }
}

/// Who locks again and again, as one that polls does, would hardly ever be found outside.
void QuickMutex::let_others() {
  ::sched_yield();
  constexpr int kLooks = 1000;  // a few microseconds
  for (int i = 0; i < kLooks && n_waiting_.load(std::memory_order_relaxed) != 0; ++i) {
    if (owner_.load(std::memory_order_relaxed) != 0) return;
  }
}

}  // namespace samestep
