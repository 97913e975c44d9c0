#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "core/deadline.h"

namespace samestep {

/// A sleep from which another rank wakes. What is waited for must be looked at between its beginning and `sleep`.
class Nap {
 public:
  Nap() = default;
  Nap(const Nap&) = delete;
  Nap& operator=(const Nap&) = delete;
  virtual ~Nap() = default;
  /// Until something may have come since the last look, at most for about a millisecond.
  virtual void sleep() = 0;
};

/// Paces a loop that polls: spins first, then gives the CPU to others, then sleeps for short times. With more ranks
/// than CPUs it sleeps at once where turns of others are slow (see Turns), and another rank wakes it. A rank with a CPU
/// of its own does not, for the kernel would bring it to the CPU of the rank that wakes it.
class Pause {
 public:
  /// Sleeps until something may have come, at most for about a millisecond; false where it cannot.
  using Rest = std::function<bool()>;
  /// Null where nothing wakes.
  using BeginNap = std::function<std::unique_ptr<Nap>()>;

  explicit Pause(bool oversubscribed, Rest rest = {}, BeginNap begin_nap = {})
      : oversubscribed_(oversubscribed), rest_(std::move(rest)), begin_nap_(std::move(begin_nap)) {}
  /// Of a loop that ends at the first true, for there is another one that may sleep.
  static Pause of_who_leaves(bool oversubscribed) {
    Pause pause(oversubscribed);
    pause.leaves_ = true;
    return pause;
  }

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
  bool may_sleep() const;
  void sleep();

  bool oversubscribed_;
  bool leaves_ = false;
  Rest rest_;
  BeginNap begin_nap_;
  std::unique_ptr<Nap> nap_;
  unsigned polls_ = 0;
  bool moved_ = false;  // since the last poll
  Clock::time_point started_{};
  Clock::time_point last_look_{};
  Seconds waited_{0}, moved_at_{0};
};

/// As long as another CPU takes to write a cache line, some 30 ns.
void pause_for_a_line();

}  // namespace samestep
