#pragma once

#include <atomic>
#include <cstdint>

#include "core/deadline.h"

namespace samestep {

/// Does a thread that gives its CPU away get it back soon? Ranks that wait for each other give it back within
/// microseconds. Another process that computes there keeps it for a slice of the scheduler, milliseconds, though what
/// was waited for has long been there: then it is better to sleep, for who is woken comes before those that compute.
///
/// Thread-safe.
class Turns {
 public:
  /// Gives the CPU away, and looks now and then how long that takes.
  void give_way();
  /// Sleep instead?
  bool are_slow() const { return n_slow_.load(std::memory_order_relaxed) >= kSlow && are_slow(Clock::now()); }

  /// The same with times of the caller's.
  void took(Clock::duration time, Clock::time_point now);
  bool are_slow(Clock::time_point now) const;

  /// Tests that must not depend on time.
  void take_no_times() { takes_times_ = false; }

 private:
  // One slow turn counts as three; a quick one takes one away. A rank that computes, and does not come back soon, is
  // not yet a reason: it may be the only time among thousands of calls.
  static constexpr int kSlow = 5, kMost = 8, kCountsAs = 3;

  std::atomic<int> n_slow_{0};
  std::atomic<std::uint32_t> n_given_{0};
  std::atomic<Clock::rep> try_again_at_{0}, try_again_after_{0};
  bool takes_times_ = true;
};

/// Those of this process, in waits for calls that are over at once. In others the rank that has its turn may be at work
/// on the same operation.
Turns& turns_of_short_calls();

}  // namespace samestep
