#pragma once

#include <chrono>

namespace samestep {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// The point in time at which a wait ends. It is created once, where the user's call enters, and passed
/// down; no layer restarts it.
class Deadline {
 public:
  /// `timeout` from now. A negative or NaN timeout has already passed; at most 1e9 s (30 years).
  static Deadline after(Seconds timeout) {
    constexpr Seconds kForever{1e9};
    const Seconds clamped = timeout > kForever ? kForever : timeout > Seconds{0} ? timeout : Seconds{0};
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(clamped), clamped);
  }

  /// `left` from now, of a `timeout` that began before.
  static Deadline after(Seconds left, Seconds timeout) {
    Deadline deadline = after(left);
    deadline.timeout_ = timeout;
    return deadline;
  }

  bool passed() const { return Clock::now() >= when_; }
  bool is_later_than(const Deadline& other) const { return when_ > other.when_; }
  /// Time left, negative when passed.
  Seconds left() const { return when_ - Clock::now(); }
  /// The timeout it was made from, for error texts.
  Seconds timeout() const { return timeout_; }

 private:
  Deadline(Clock::time_point when, Seconds timeout) : when_(when), timeout_(timeout) {}
  Clock::time_point when_;
  Seconds timeout_;
};

}  // namespace samestep
