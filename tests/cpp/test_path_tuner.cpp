#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <map>

#include "node/path_tuner.h"
#include "node/wrapping_timestamp.h"

using samestep::PathTuner;
using Path = PathTuner::Path;

namespace {

constexpr std::size_t kNbytes = 1 << 20;

/// One operation; `direct` and `staged` are the durations of the two paths.
Path run(PathTuner& tuner, double direct, double staged, std::size_t nbytes = kNbytes) {
  const Path path = tuner.choose(nbytes);
  tuner.record_time(nbytes, path, path == Path::single_copy ? direct : staged);
  return path;
}

}  // namespace

TEST_CASE("path tuner: each path is tried three times, then the faster one is used") {
  for (const bool direct_is_faster : {true, false}) {
    PathTuner tuner;
    const double direct = direct_is_faster ? 1 : 2, staged = direct_is_faster ? 2 : 1;
    int n_direct = 0;
    for (int i = 0; i < 6; ++i) n_direct += run(tuner, direct, staged) == Path::single_copy ? 1 : 0;
    CHECK(n_direct == 3);
    const Path faster = direct_is_faster ? Path::single_copy : Path::copy_in_copy_out;
    for (int i = 6; i < 64; ++i) CHECK(run(tuner, direct, staged) == faster);
  }
}

TEST_CASE("path tuner: one slow operation does not decide, and a change is noticed") {
  PathTuner tuner;
  for (int i = 0; i < 6; ++i) run(tuner, i == 0 ? 100 : 1, 2);
  CHECK(run(tuner, 1, 2) == Path::single_copy);
  int n_staged = 0;
  for (int i = 0; i < 640; ++i) n_staged += run(tuner, 4, 2) == Path::copy_in_copy_out ? 1 : 0;
  CHECK(n_staged > 500);
}

TEST_CASE("path tuner: sizes are separate") {
  PathTuner tuner;
  for (int i = 0; i < 6; ++i) {
    run(tuner, 1, 2, kNbytes);
    run(tuner, 2, 1, 4 * kNbytes);
  }
  CHECK(run(tuner, 1, 2, kNbytes) == Path::single_copy);
  CHECK(run(tuner, 2, 1, 4 * kNbytes) == Path::copy_in_copy_out);
}

TEST_CASE("path tuner: negative times are ignored") {  // of ranks that start more than two minutes after each other
  PathTuner tuner;
  for (int i = 0; i < 6; ++i) run(tuner, i == 0 ? -1 : 2, 1);
  CHECK(run(tuner, 2, 1) == Path::copy_in_copy_out);
}

TEST_CASE("path tuner: operations that are posted before any time is known alternate") {
  PathTuner tuner;
  for (int i = 0; i < 40; ++i)
    CHECK(tuner.choose(kNbytes) == (i % 2 == 0 ? Path::single_copy : Path::copy_in_copy_out));
}

TEST_CASE("path tuner: of three candidates all are tried, the fastest is used, both others are tried again") {
  for (const std::array open : {std::array{Path::single_copy, Path::copy_in_copy_out, Path::single_copy_split},
                                std::array{Path::single_copy, Path::copy_in_copy_out, Path::copy_in_copy_out_nt}}) {
    for (const Path fastest : open) {
      PathTuner tuner;
      std::map<Path, int> taken;
      const auto run_one = [&] {
        const Path path = tuner.choose(kNbytes, open);
        tuner.record_time(kNbytes, path, path == fastest ? 1 : 2);
        ++taken[path];
      };
      for (int i = 0; i < 9; ++i) run_one();
      for (const Path path : open) CHECK(taken[path] == 3);
      taken.clear();
      for (int i = 0; i < 640; ++i) run_one();
      for (const Path path : open) CHECK(taken[path] == (path == fastest ? 630 : 5));
      CHECK(taken.size() == open.size());
    }
  }
}

TEST_CASE("path tuner: ranks that expect stages do not check for CMA, and do once rank 0 has chosen it") {
  PathTuner first, other;  // of rank 0 and of another rank
  int n_checks = 0, n_direct = 0, n_missed = 0;
  const auto run_one = [&](double direct) {
    const Path chosen = first.choose(kNbytes);
    const bool is_checked = !other.needs_no_cma(kNbytes);
    const Path used = is_checked ? chosen : Path::copy_in_copy_out;
    for (PathTuner* tuner : {&first, &other}) tuner->record_choice(kNbytes, chosen, used);
    first.record_time(kNbytes, used, used == Path::single_copy ? direct : 2);
    n_checks += is_checked;
    n_direct += used == Path::single_copy;
    n_missed += chosen != used;
  };
  for (int i = 0; i < 12; ++i) run_one(3);
  CHECK(n_checks == 12);
  n_checks = n_direct = 0;
  for (int i = 0; i < 640; ++i) run_one(3);
  CHECK(n_missed == 10);
  CHECK(n_direct == 10);
  CHECK(n_checks == 20);  // and once more, as CMA was chosen last
  n_direct = 0;
  for (int i = 0; i < 640; ++i) run_one(1);  // and now CMA is faster
  CHECK(n_direct > 400);
}

TEST_CASE("path tuner: a choice that cannot be followed is repeated three times") {
  PathTuner tuner;
  for (int i = 0; i < 12; ++i) {
    const Path chosen = tuner.choose(kNbytes);
    tuner.record_choice(kNbytes, chosen, Path::copy_in_copy_out);
    tuner.record_time(kNbytes, Path::copy_in_copy_out, 1);
    CHECK(chosen == (i % 5 == 4 ? Path::copy_in_copy_out : Path::single_copy));
  }
}

TEST_CASE("wrapping timestamp: the later one of two, and the time between them") {
  using samestep::WrappingTimestamp;
  constexpr std::chrono::milliseconds kMinGap{1};
  const WrappingTimestamp before = WrappingTimestamp::now();
  const auto clock = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - clock < kMinGap) {
  }
  const WrappingTimestamp after = WrappingTimestamp::now();
  CHECK(after.since(before) > 0.00099);
  CHECK(before.since(after) == -after.since(before));
  CHECK(after.later(before).since(after) == 0);
  CHECK(before.later(after).since(after) == 0);
}
