#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "core/deadline.h"

namespace samestep {

/// A sleep that another rank can end. The caller must check its condition between the construction and `sleep`, or it
/// may miss the wake-up.
class Waiter {
 public:
  Waiter() = default;
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  virtual ~Waiter() = default;
  /// Sleeps until something may have changed since the construction or the last sleep; at most about a millisecond.
  virtual void sleep() = 0;
};

/// Paces a polling loop: spins first, then yields the CPU, then sleeps for short times. If yields are slow (see
/// YieldMonitor) it sleeps at once, until another rank wakes it.
class Backoff {
 public:
  /// Sleeps until something may have arrived, at most about a millisecond. False if it cannot.
  using WaitForActivity = std::function<bool()>;
  /// Returns null if nothing could end the sleep.
  using MakeWaiter = std::function<std::unique_ptr<Waiter>()>;

  explicit Backoff(bool oversubscribed, WaitForActivity wait_for_activity = {}, MakeWaiter make_waiter = {})
      : oversubscribed_(oversubscribed),
        wait_for_activity_(std::move(wait_for_activity)),
        make_waiter_(std::move(make_waiter)) {}
  /// For the bounded loop of the fast path: `step` returns true where it would sleep, and the queue does the sleeping.
  static Backoff for_fast_path(bool oversubscribed) {
    Backoff pause(oversubscribed);
    pause.is_fast_path_ = true;
    return pause;
  }

  /// To be called after each poll without a result. True about every millisecond: time to check deadlines, peers and
  /// interrupts.
  bool step();

  /// Data has moved: the operation is in progress, so sleeping or yielding would only delay it.
  void note_progress() {
    if (!wait_for_activity_) polls_ = 0;
    progressed_at_ = waited_;
    has_progressed_ = true;
  }

  /// Time since the clock was first read.
  Seconds waited() const { return waited_; }

 private:
  bool wait_for_activity();
  bool may_sleep() const;
  void sleep();

  bool oversubscribed_;
  bool is_fast_path_ = false;
  WaitForActivity wait_for_activity_;
  MakeWaiter make_waiter_;
  std::unique_ptr<Waiter> waiter_;
  unsigned polls_ = 0;
  bool has_progressed_ = false;  // since the last poll
  Clock::time_point started_{};
  Clock::time_point last_clock_read_{};
  Seconds waited_{0}, progressed_at_{0};
};

/// Spins for about 30 ns, the time in which a cache line moves from one CPU to another.
void spin_for_line_transfer();

}  // namespace samestep
