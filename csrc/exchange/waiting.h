#pragma once

#include <functional>

#include "core/deadline.h"

namespace samestep {

/// Paces a loop that polls: spins first, then gives the CPU to others, then sleeps for short times.
class Pause {
 public:
  /// Sleeps until something may have come, at most for about a millisecond; false where it cannot.
  using Rest = std::function<bool()>;

  explicit Pause(bool oversubscribed, Rest rest = {}) : oversubscribed_(oversubscribed), rest_(std::move(rest)) {}

  /// To be called after each poll in vain. True about every millisecond: time to look at the clock,
  /// the peers and the user.
  bool step();

  /// Data has moved: what is waited for is under way, so that sleeps, and others' turns, would only hold it up.
  void moved() {
    if (!rest_) polls_ = 0;
    moved_at_ = waited_;
    moved_ = true;
  }

  /// Since the clock was first looked at.
  Seconds waited() const { return waited_; }

 private:
  bool rest();

  bool oversubscribed_;
  Rest rest_;
  unsigned polls_ = 0;
  bool moved_ = false;  // since the last poll
  Clock::time_point started_{};
  Clock::time_point last_look_{};
  Seconds waited_{0}, moved_at_{0};
};

/// As long as another CPU takes to write a cache line, some 30 ns.
void pause_for_a_line();

}  // namespace samestep
