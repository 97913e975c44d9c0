#include "exchange/waiting.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

#include "exchange/turns.h"
#include "kernels/relax.h"

namespace samestep {
namespace {

constexpr unsigned kSpins = 4000;           // polls before giving way; one costs 5 ns, or 100 where it is one of MPI
constexpr unsigned kSpinsBeforeRest = 200;  // polls of sockets, some 80 us: as long as a network may take
constexpr unsigned kYieldsBeforeRest = 8;
constexpr unsigned kPollsPerLook = 16;  // after that, between looks at the clock
constexpr Seconds kLookEvery{1e-3};
constexpr Seconds kSleepAfter{20e-3};  // a straggler: stop burning the CPU it may need
constexpr std::chrono::microseconds kSleep{100};

/// How often `relax` takes 30 ns: on processors of x86 it takes 10 to 50 each.
int relaxes_for_a_line() {
  constexpr int kTries = 3, kTimes = 100;
  constexpr std::chrono::nanoseconds kLine{30};
  auto least = Clock::duration::max();
  for (int i = 0; i < kTries; ++i) {
    const Clock::time_point start = Clock::now();
    for (int k = 0; k < kTimes; ++k) kernels::relax();
    least = std::min(least, Clock::now() - start);
  }
  return static_cast<int>(std::min<std::int64_t>(kTimes * kLine / std::max(least, Clock::duration{1}), kTimes));
}

}  // namespace

void pause_for_a_line() {
  static const int n_relaxes = relaxes_for_a_line();
  for (int i = 0; i < n_relaxes; ++i) kernels::relax();
}

bool Pause::step() {
  ++polls_;
  // Where data moves all the time, the clock is looked at all the same.
  if (!std::exchange(moved_, false) && !rest()) {
    if (!oversubscribed_ && polls_ < kSpins) return false;
    const bool sleeps = may_sleep();
    if (sleeps && leaves_) return true;
    if (sleeps) {
      sleep();
    } else if (oversubscribed_ && leaves_) {
      turns_of_short_calls().give_way();
    } else {
      ::sched_yield();
    }
    if (polls_ % kPollsPerLook != 0 && !sleeps) return false;
  }
  const Clock::time_point now = Clock::now();
  if (started_ == Clock::time_point{}) started_ = last_look_ = now;
  waited_ = now - started_;
  if (now - last_look_ < kLookEvery) return false;
  last_look_ = now;
  return true;
}

bool Pause::may_sleep() const {
  return waited_ - moved_at_ > kSleepAfter || (oversubscribed_ && turns_of_short_calls().are_slow());
}

void Pause::sleep() {
  if (oversubscribed_ && begin_nap_ && !nap_) {
    nap_ = begin_nap_();
    if (nap_) return;
    begin_nap_ = {};
  }
  nap_ ? nap_->sleep() : std::this_thread::sleep_for(kSleep);
}

bool Pause::rest() {
  if (!rest_ || polls_ < (oversubscribed_ ? kYieldsBeforeRest : kSpinsBeforeRest)) return false;
  if (rest_()) return true;
  rest_ = {};
  return false;
}

}  // namespace samestep
