#include "waiting/yield_monitor.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace samestep {
namespace {

constexpr std::uint32_t kTimedEvery = 4;  // yields; reading the clock costs a hundredth of one
constexpr std::chrono::milliseconds kSlowWithOwnCpu{10};
constexpr Clock::duration kTryAgainAfter = std::chrono::milliseconds{100}, kTryAgainAtMost = std::chrono::seconds{2};

}  // namespace

void YieldMonitor::timed_yield() {
  // While yields are slow every one is timed, since they are rare then: the rank mostly sleeps, and each is a trial.
  const bool was_slow = n_slow_.get() >= kSlow;
  // relaxed: a statistic
  const bool is_timed = was_slow || n_yields_.value.fetch_add(1, std::memory_order_relaxed) % kTimedEvery == 0;
  if (!is_timing_ || !is_timed) {
    ::sched_yield();
    return;
  }
  const Clock::time_point start = Clock::now();
  ::sched_yield();
  const Clock::time_point end = Clock::now();
  record(end - start, end);
}

void YieldMonitor::record(Clock::duration time, Clock::time_point now) {
  const int n = n_slow_.get();
  if (time < slow_) {
    // Yields are quick again. The next slow phase begins with the short pause, and not with the last one doubled.
    if (n == 1) try_again_after_.set(0);
    if (n != 0) n_slow_.set(std::min(n, kSlow) - 1);
    return;
  }
  n_slow_.set(std::min(n + kSlowWeight, kMaxSlow));
  if (n + kSlowWeight < kSlow) return;
  // A trial that is slow costs milliseconds, so each one that fails doubles the time to the next.
  const Clock::duration before(try_again_after_.get());
  const Clock::duration after = std::clamp(2 * before, kTryAgainAfter, kTryAgainAtMost);
  try_again_after_.set(after.count());
  try_again_at_.set((now + after).time_since_epoch().count());
}

bool YieldMonitor::is_slow(Clock::time_point now) const {
  const Clock::rep at = try_again_at_.get();
  return n_slow_.get() >= kSlow && now.time_since_epoch().count() < at;
}

YieldMonitor& yield_monitor(bool oversubscribed) {
  static constinit YieldMonitor sharing_cpus, with_own_cpu(kSlowWithOwnCpu);
  return oversubscribed ? sharing_cpus : with_own_cpu;
}

}  // namespace samestep
