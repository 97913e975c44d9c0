#pragma once

#include <chrono>

namespace samestep {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// A point in time until which a caller is ready to wait. It is made once, where the user's
/// call comes in, and handed down; nobody restarts it.
class Deadline {
 public:
  /// `timeout` from now; a negative or not-a-number timeout counts as 0 and has already
  /// passed; more than 1e9 s (30 years) counts as that.
  static Deadline after(Seconds timeout) {
    constexpr Seconds kForever{1e9};
    const Seconds clamped = timeout > kForever ? kForever : timeout > Seconds{0} ? timeout : Seconds{0};
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(clamped), clamped);
  }

  bool passed() const { return Clock::now() >= when_; }
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
