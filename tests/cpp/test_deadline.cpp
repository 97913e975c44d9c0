#include <doctest/doctest.h>

#include <cmath>
#include <thread>

#include "core/deadline.h"

namespace samestep {
namespace {

TEST_CASE("Deadline: passes when its time is over, not before") {
  constexpr std::chrono::milliseconds kTimeout{20};
  const Clock::time_point before = Clock::now();
  const Deadline deadline = Deadline::after(kTimeout);
  const Clock::time_point since = Clock::now();
  bool too_early = false;
  while (Clock::now() - since < kTimeout) {
    const bool passed = deadline.passed() || deadline.left() <= Seconds{0};
    // Read last: wherever this thread has had to wait for a processor, the deadline may have passed.
    too_early = too_early || (passed && Clock::now() - before < kTimeout);
  }
  CHECK(!too_early);
  std::this_thread::sleep_until(since + kTimeout + std::chrono::milliseconds(1));
  CHECK(deadline.passed());
  CHECK(deadline.left() < Seconds{0});
  CHECK(deadline.timeout() == Seconds{0.02});
}

TEST_CASE("Deadline: none, a negative and no number have passed at once") {
  for (const double timeout : {0.0, -0.0, -1.0, -1e300, -HUGE_VAL, std::nan("")}) {
    CAPTURE(timeout);
    CHECK(Deadline::after(Seconds{timeout}).passed());
  }
}

TEST_CASE("Deadline: an endless timeout does not overflow") {
  for (const double timeout : {1e9, 1e18, 1e300, HUGE_VAL}) {
    const Deadline deadline = Deadline::after(Seconds{timeout});
    CHECK(!deadline.passed());
    CHECK(deadline.left() > Seconds{0.9e9});
  }
}

}  // namespace
}  // namespace samestep
