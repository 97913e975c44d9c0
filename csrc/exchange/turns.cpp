#include "exchange/turns.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace samestep {
namespace {

constexpr std::uint32_t kTimedEvery = 4;  // turns: a look at the clock costs a hundredth of one
constexpr std::chrono::microseconds kLong{500};
constexpr Clock::duration kTryAgainAfter = std::chrono::milliseconds{100}, kTryAgainAtMost = std::chrono::seconds{2};

}  // namespace

void Turns::give_way() {
  const bool was_slow = n_slow_.load(std::memory_order_relaxed) >= kSlow;
  const bool is_timed = was_slow || n_given_.fetch_add(1, std::memory_order_relaxed) % kTimedEvery == 0;
  if (!takes_times_ || !is_timed) {
    ::sched_yield();
    return;
  }
  const Clock::time_point start = Clock::now();
  ::sched_yield();
  const Clock::time_point end = Clock::now();
  took(end - start, end);
}

void Turns::took(Clock::duration time, Clock::time_point now) {
  const int n = n_slow_.load(std::memory_order_relaxed);
  if (time < kLong) {
    if (n == 1) try_again_after_.store(0, std::memory_order_relaxed);
    if (n != 0) n_slow_.store(std::min(n, kSlow) - 1, std::memory_order_relaxed);
    return;
  }
  n_slow_.store(std::min(n + kCountsAs, kMost), std::memory_order_relaxed);
  if (n + kCountsAs < kSlow) return;
  const Clock::duration before(try_again_after_.load(std::memory_order_relaxed));
  const Clock::duration after = std::clamp(2 * before, kTryAgainAfter, kTryAgainAtMost);
  try_again_after_.store(after.count(), std::memory_order_relaxed);
  try_again_at_.store((now + after).time_since_epoch().count(), std::memory_order_relaxed);
}

bool Turns::are_slow(Clock::time_point now) const {
  const Clock::rep at = try_again_at_.load(std::memory_order_relaxed);
  return n_slow_.load(std::memory_order_relaxed) >= kSlow && now.time_since_epoch().count() < at;
}

Turns& turns_of_short_calls() {
  static Turns all;
  return all;
}

}  // namespace samestep
