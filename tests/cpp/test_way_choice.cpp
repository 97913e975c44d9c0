#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <map>

#include "node/moment.h"
#include "node/way_choice.h"

using samestep::WayChoice;
using Way = WayChoice::Way;

namespace {

constexpr std::size_t kNbytes = 1 << 20;

/// One operation, of which `direct` and `staged` say how long each way takes.
Way run(WayChoice& ways, double direct, double staged, std::size_t nbytes = kNbytes) {
  const Way way = ways.next(nbytes);
  ways.took(nbytes, way, way == Way::direct ? direct : staged);
  return way;
}

}  // namespace

TEST_CASE("way choice: each way is tried three times, then the faster one is taken") {
  for (const bool direct_is_faster : {true, false}) {
    WayChoice ways;
    const double direct = direct_is_faster ? 1 : 2, staged = direct_is_faster ? 2 : 1;
    int n_direct = 0;
    for (int i = 0; i < 6; ++i) n_direct += run(ways, direct, staged) == Way::direct ? 1 : 0;
    CHECK(n_direct == 3);
    const Way faster = direct_is_faster ? Way::direct : Way::staged;
    for (int i = 6; i < 64; ++i) CHECK(run(ways, direct, staged) == faster);
  }
}

TEST_CASE("way choice: one slow operation does not decide, and a change is noticed") {
  WayChoice ways;
  for (int i = 0; i < 6; ++i) run(ways, i == 0 ? 100 : 1, 2);
  CHECK(run(ways, 1, 2) == Way::direct);
  int n_staged = 0;
  for (int i = 0; i < 640; ++i) n_staged += run(ways, 4, 2) == Way::staged ? 1 : 0;
  CHECK(n_staged > 500);
}

TEST_CASE("way choice: sizes do not mix") {
  WayChoice ways;
  for (int i = 0; i < 6; ++i) {
    run(ways, 1, 2, kNbytes);
    run(ways, 2, 1, 4 * kNbytes);
  }
  CHECK(run(ways, 1, 2, kNbytes) == Way::direct);
  CHECK(run(ways, 2, 1, 4 * kNbytes) == Way::staged);
}

TEST_CASE("way choice: less than nothing is no time") {  // of ranks that began more than two minutes apart
  WayChoice ways;
  for (int i = 0; i < 6; ++i) run(ways, i == 0 ? -1 : 2, 1);
  CHECK(run(ways, 2, 1) == Way::staged);
}

TEST_CASE("way choice: operations that are announced ahead of all times alternate") {
  WayChoice ways;
  for (int i = 0; i < 40; ++i) CHECK(ways.next(kNbytes) == (i % 2 == 0 ? Way::direct : Way::staged));
}

TEST_CASE("way choice: of three open ways all are tried, the fastest is taken, both others are looked at again") {
  for (const std::array open :
       {std::array{Way::direct, Way::staged, Way::divided}, std::array{Way::direct, Way::staged, Way::past_caches}}) {
    for (const Way fastest : open) {
      WayChoice ways;
      std::map<Way, int> taken;
      const auto run_one = [&] {
        const Way way = ways.next(kNbytes, open);
        ways.took(kNbytes, way, way == fastest ? 1 : 2);
        ++taken[way];
      };
      for (int i = 0; i < 9; ++i) run_one();
      for (const Way way : open) CHECK(taken[way] == 3);
      taken.clear();
      for (int i = 0; i < 640; ++i) run_one();
      for (const Way way : open) CHECK(taken[way] == (way == fastest ? 630 : 5));
      CHECK(taken.size() == open.size());
    }
  }
}

TEST_CASE("moments: the later one of two, and the time between them") {
  using samestep::Moment;
  constexpr std::chrono::milliseconds kLeast{1};
  const Moment before = Moment::now();
  const auto clock = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - clock < kLeast) {
  }
  const Moment after = Moment::now();
  CHECK(after.since(before) > 0.00099);
  CHECK(before.since(after) == -after.since(before));
  CHECK(after.later(before).since(after) == 0);
  CHECK(before.later(after).since(after) == 0);
}
