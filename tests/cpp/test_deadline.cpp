#include <doctest/doctest.h>

#include <cmath>
#include <thread>

#include "core/deadline.h"

namespace samestep {
namespace {

TEST_CASE("Deadline: passes when its time is over, not before") {
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(20));
  CHECK(!deadline.passed());
  CHECK(deadline.left() > Seconds{0});
  std::this_thread::sleep_for(std::chrono::milliseconds(25));
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
