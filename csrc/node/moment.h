#pragma once

#include <chrono>
#include <cstdint>

#include "core/deadline.h"

namespace samestep {

/// When a rank began an operation, by the clock that the processes of a host share, in 32 bits: it goes round in
/// 4.5 minutes.
class Moment {
 public:
  static Moment now() {
    const std::chrono::nanoseconds time = Clock::now().time_since_epoch();
    Moment moment;
    moment.ticks_ = static_cast<std::uint32_t>(time.count() / kTick.count());
    return moment;
  }
  Moment later(Moment other) const { return since(other) < 0 ? other : *this; }
  /// Seconds from `other` to this one, where they are less than two minutes apart; else any, also less than nothing.
  double since(Moment other) const {
    const auto ticks = static_cast<std::int32_t>(ticks_ - other.ticks_);
    return std::chrono::duration<double>(ticks * kTick).count();
  }

 private:
  static constexpr std::chrono::nanoseconds kTick{64};
  std::uint32_t ticks_ = 0;
};

}  // namespace samestep
