#include "waiting/backoff.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

#include "kernels/relax.h"
#include "waiting/yield_monitor.h"

namespace samestep {
namespace {

constexpr unsigned kSpinPolls = 4000;               // before yielding; a poll costs 5 ns, one of MPI 100 ns
constexpr unsigned kSpinPollsBeforeActivity = 200;  // polls of sockets, some 80 us: as long as a network may take
constexpr unsigned kYieldPolls = 8;
constexpr unsigned kPollsPerClockRead = 16;  // once it yields
constexpr Seconds kLookEvery{1e-3};
constexpr Seconds kSleepAfterPolls{20e-3};  // the late rank may need this CPU
constexpr std::chrono::microseconds kSleep{100};

/// How many times `relax` takes 30 ns. One takes 10 to 50 ns, depending on the x86 processor.
int relaxes_per_line_transfer() {
  constexpr int kTries = 3, kTimes = 100;
  constexpr std::chrono::nanoseconds kLine{30};
  // The shortest of a few: an interrupt only makes a measurement longer, and too few pauses would be the result.
  auto least = Clock::duration::max();
  for (int i = 0; i < kTries; ++i) {
    const Clock::time_point start = Clock::now();
    for (int k = 0; k < kTimes; ++k) kernels::relax();
    least = std::min(least, Clock::now() - start);
  }
  return static_cast<int>(std::min<std::int64_t>(kTimes * kLine / std::max(least, Clock::duration{1}), kTimes));
}

}  // namespace

void spin_for_line_transfer() {
  static const int n_relaxes = relaxes_per_line_transfer();
  for (int i = 0; i < n_relaxes; ++i) kernels::relax();
}

bool Backoff::step() {
  ++polls_;
  // While data moves, neither yields nor sleeps, but still reads the clock: a deadline may pass.
  if (!std::exchange(has_progressed_, false) && !wait_for_activity()) {
    if (!oversubscribed_ && polls_ < kSpinPolls) return false;
    // The fast path holds the mutex of its group. Instead of sleeping with it, it returns, and the caller queues the
    // operation.
    const bool sleeps = may_sleep();
    if (sleeps && is_fast_path_) return true;
    if (sleeps) {
      sleep();
    } else if (is_fast_path_ || !oversubscribed_) {
      yield_monitor(oversubscribed_).timed_yield();
    } else {
      ::sched_yield();
    }
    if (polls_ % kPollsPerClockRead != 0 && !sleeps) return false;
  }
  const Clock::time_point now = Clock::now();
  if (started_ == Clock::time_point{}) started_ = last_clock_read_ = now;
  waited_ = now - started_;
  if (now - last_clock_read_ < kLookEvery) return false;
  last_clock_read_ = now;
  return true;
}

bool Backoff::may_sleep() const {
  return waited_ - progressed_at_ > kSleepAfterPolls || yield_monitor(oversubscribed_).is_slow();
}

void Backoff::sleep() {
  // With a CPU of its own a rank is not woken unless others compute there: it would be moved to that of the waker.
  if (make_waiter_ && !waiter_ && (oversubscribed_ || yield_monitor(oversubscribed_).is_slow())) {
    waiter_ = make_waiter_();
    if (waiter_) return;  // the caller polls once more before it sleeps; see Waiter
    // Nothing could end the sleep. That does not change, so it is asked once.
    make_waiter_ = {};
  }
  waiter_ ? waiter_->sleep() : std::this_thread::sleep_for(kSleep);
}

bool Backoff::wait_for_activity() {
  if (!wait_for_activity_ || polls_ < (oversubscribed_ ? kYieldPolls : kSpinPollsBeforeActivity)) return false;
  if (wait_for_activity_()) return true;
  // The transport cannot wake a sleeping thread, so that from now on this rank spins, yields and sleeps by time.
  wait_for_activity_ = {};
  return false;
}

}  // namespace samestep
