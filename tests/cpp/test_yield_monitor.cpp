#include <doctest/doctest.h>

#include <chrono>

#include "waiting/backoff.h"
#include "waiting/yield_monitor.h"

using namespace samestep;
using namespace std::chrono_literals;

namespace {

constexpr Clock::time_point kStart{1h};

/// The first time at which yields no longer count as slow.
Clock::time_point first_retry(const YieldMonitor& yields, Clock::time_point from) {
  while (yields.is_slow(from)) from += 1ms;
  return from;
}

/// A monitor of the process, without what the other tests of this process recorded on a busy machine.
YieldMonitor& fresh_yield_monitor(bool oversubscribed) {
  YieldMonitor& yields = yield_monitor(oversubscribed);
  for (int i = 0; i < 9; ++i) yields.record(2us, kStart);
  return yields;
}

}  // namespace

TEST_CASE("yield monitor: one slow yield among many is no reason to sleep, two close together are") {
  YieldMonitor yields;
  for (int i = 0; i < 100; ++i) {
    yields.record(3ms, kStart);
    CHECK_FALSE(yields.is_slow(kStart));
    for (int k = 0; k < 3; ++k) yields.record(2us, kStart);
  }
  yields.record(3ms, kStart);
  yields.record(2us, kStart);
  CHECK_FALSE(yields.is_slow(kStart));
  yields.record(3ms, kStart);
  CHECK(yields.is_slow(kStart));
}

TEST_CASE("yield monitor: yields are retried, at growing intervals while they are slow") {
  YieldMonitor yields;
  yields.record(3ms, kStart);
  yields.record(3ms, kStart);
  Clock::time_point at = kStart;
  Clock::duration before = 0s;
  for (int i = 0; i < 8; ++i) {
    const Clock::time_point next = first_retry(yields, at);
    CHECK(next - at >= before);
    CHECK(next - at <= 2s);
    before = next - at;
    at = next;
    yields.record(3ms, at);
    CHECK(yields.is_slow(at));
  }
  CHECK(before == 2s);
}

TEST_CASE("yield monitor: a quick yield ends the sleeping, and one slow yield resumes it") {
  YieldMonitor yields;
  for (int i = 0; i < 9; ++i) yields.record(3ms, kStart);
  const Clock::time_point later = first_retry(yields, kStart);
  yields.record(2us, later);
  CHECK_FALSE(yields.is_slow(kStart));
  yields.record(3ms, later);
  CHECK(yields.is_slow(later));
}

TEST_CASE("yield monitor: after several quick yields the history is forgotten") {
  YieldMonitor yields;
  for (int i = 0; i < 9; ++i) yields.record(3ms, kStart);
  for (int i = 0; i < 9; ++i) yields.record(2us, kStart);
  yields.record(3ms, kStart);
  CHECK_FALSE(yields.is_slow(kStart));
  yields.record(3ms, kStart);
  CHECK(first_retry(yields, kStart) - kStart == 100ms);
}

TEST_CASE("yield monitor: with a CPU of its own a rank bears the time slices of two processes") {
  YieldMonitor& yields = fresh_yield_monitor(/*oversubscribed=*/false);
  YieldMonitor& shared = fresh_yield_monitor(/*oversubscribed=*/true);
  for (int i = 0; i < 9; ++i) yields.record(8ms, kStart);
  CHECK_FALSE(yields.is_slow(kStart));
  for (int i = 0; i < 2; ++i) yields.record(12ms, kStart);
  CHECK(yields.is_slow(kStart));
  CHECK_FALSE(shared.is_slow(kStart));
  for (int i = 0; i < 2; ++i) shared.record(8ms, kStart);
  CHECK(shared.is_slow(kStart));
  fresh_yield_monitor(/*oversubscribed=*/false);
  fresh_yield_monitor(/*oversubscribed=*/true);
}

namespace {

struct Counted final : Waiter {
  explicit Counted(int& n) : n_slept(n) {}
  void sleep() override { ++n_slept; }
  int& n_slept;
};

}  // namespace

TEST_CASE("backoff: a long wait makes a waiter, and polls once more before it sleeps") {
  int n_made = 0, n_slept = 0;
  Backoff backoff(/*oversubscribed=*/true, {}, [&] {
    ++n_made;
    return std::make_unique<Counted>(n_slept);
  });
  while (n_made == 0) backoff.step();
  CHECK(n_slept == 0);
  while (n_slept == 0) backoff.step();  // it yields where yields are quick again, and no 20 ms have passed
  CHECK(n_slept == 1);
  CHECK(n_made == 1);
}

TEST_CASE("backoff: with a CPU of its own a rank sleeps early, and is woken, where yields are slow") {
  YieldMonitor& yields = fresh_yield_monitor(/*oversubscribed=*/false);
  int n_slept = 0;
  Backoff backoff(/*oversubscribed=*/false, {}, [&] { return std::make_unique<Counted>(n_slept); });
  for (int i = 0; i < 10'000 && n_slept < 2; ++i) {
    yields.record(12ms, Clock::now());  // each time, since this thread may wait for a CPU, too
    backoff.step();
  }
  CHECK(n_slept == 2);
  fresh_yield_monitor(/*oversubscribed=*/false);
}
