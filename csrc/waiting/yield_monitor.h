#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "core/deadline.h"

namespace samestep {

/// Measures how long `sched_yield` takes. Ranks that wait for each other return the CPU within microseconds. A process
/// that computes on the same CPU keeps it for a scheduler slice of milliseconds, long after the data it waits for has
/// arrived. Then sleeping is better, because the scheduler favours a woken thread over one that computes.
///
/// Thread-safe.
class YieldMonitor {
 public:
  /// `slow`: from this duration on a yield is slow.
  explicit constexpr YieldMonitor(Clock::duration slow = std::chrono::microseconds{500}) : slow_(slow) {}

  /// Yields, and measures some of the yields.
  void timed_yield();
  /// Whether to sleep instead of yielding.
  bool is_slow() const { return n_slow_.get() >= kSlow && is_slow(Clock::now()); }

  /// The same two with the caller's clock, for tests.
  void record(Clock::duration time, Clock::time_point now);
  bool is_slow(Clock::time_point now) const;

  /// For tests that must not depend on time.
  void disable_timing() { is_timing_ = false; }

 private:
  // A slow yield counts three, a quick one minus one. A single slow yield is no reason to sleep: a rank may compute
  // once between thousands of calls.
  static constexpr int kSlow = 5, kMaxSlow = 8, kSlowWeight = 3;

  template <class T>
  struct Statistic {
    std::atomic<T> value{0};
    // Relaxed: a lost update only delays a decision.
    T get() const { return value.load(std::memory_order_relaxed); }
    void set(T to) { value.store(to, std::memory_order_relaxed); }
  };

  Clock::duration slow_;
  Statistic<int> n_slow_;
  Statistic<std::uint32_t> n_yields_;
  Statistic<Clock::rep> try_again_at_, try_again_after_;
  bool is_timing_ = true;
};

/// The monitors of this process: of yields in the fast path for ranks that share CPUs, where elsewhere a slow yield
/// proves nothing, since the rank that runs meanwhile may work on the same operation; and of all yields for ranks with
/// a CPU each. There a yield is slow that lasts as long as the time slices of three other processes: ranks that sleep
/// are moved to one CPU, and beside fewer processes that costs more than it gains.
YieldMonitor& yield_monitor(bool oversubscribed);

}  // namespace samestep
