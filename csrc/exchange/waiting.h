#pragma once

#include "core/deadline.h"

namespace samestep {

/// Paces a loop that polls: spins first, then gives the CPU to others, then sleeps for short times.
class Pause {
 public:
  explicit Pause(bool oversubscribed) : oversubscribed_(oversubscribed) {}

  /// To be called after each poll in vain. True about every millisecond: time to look at the clock,
  /// the peers and the user.
  bool step();

  /// Since the clock was first looked at.
  Seconds waited() const { return waited_; }

 private:
  bool oversubscribed_;
  unsigned polls_ = 0;
  Clock::time_point started_{};
  Clock::time_point last_look_{};
  Seconds waited_{0};
};

}  // namespace samestep
