#pragma once

#include <chrono>
#include <cstdint>

#include "core/deadline.h"

namespace samestep {

/// When a rank began an operation, by the monotonic clock of the host, in 32 bits of 64 ns: wraps around after 4.5
/// minutes.
class WrappingTimestamp {
 public:
  static WrappingTimestamp now() {
    const std::chrono::nanoseconds time = Clock::now().time_since_epoch();
    WrappingTimestamp moment;
    moment.ticks_ = static_cast<std::uint32_t>(time.count() / kTick.count());
    return moment;
  }
  WrappingTimestamp later(WrappingTimestamp other) const { return since(other) < 0 ? other : *this; }
  /// Seconds from `other` to this one if less than two minutes lie between them. Any number, also a negative one,
  /// otherwise.
  double since(WrappingTimestamp other) const {
    const auto ticks = static_cast<std::int32_t>(ticks_ - other.ticks_);
    return std::chrono::duration<double>(ticks * kTick).count();
  }

 private:
  static constexpr std::chrono::nanoseconds kTick{64};
  std::uint32_t ticks_ = 0;
};

}  // namespace samestep
