#include <doctest/doctest.h>

#include <chrono>

#include "exchange/turns.h"
#include "exchange/waiting.h"

using namespace samestep;
using namespace std::chrono_literals;

namespace {

constexpr Clock::time_point kStart{1h};

/// The moment at which turns are no longer held to be slow.
Clock::time_point tried_again(const Turns& turns, Clock::time_point from) {
  while (turns.are_slow(from)) from += 1ms;
  return from;
}

}  // namespace

TEST_CASE("turns: one slow one among many is no reason to sleep, two near each other are") {
  Turns turns;
  for (int i = 0; i < 100; ++i) {
    turns.took(3ms, kStart);
    CHECK_FALSE(turns.are_slow(kStart));
    for (int k = 0; k < 3; ++k) turns.took(2us, kStart);
  }
  turns.took(3ms, kStart);
  turns.took(2us, kStart);
  CHECK_FALSE(turns.are_slow(kStart));
  turns.took(3ms, kStart);
  CHECK(turns.are_slow(kStart));
}

TEST_CASE("turns: they are tried again, later and later while they are slow") {
  Turns turns;
  turns.took(3ms, kStart);
  turns.took(3ms, kStart);
  Clock::time_point at = kStart;
  Clock::duration before = 0s;
  for (int i = 0; i < 8; ++i) {
    const Clock::time_point next = tried_again(turns, at);
    CHECK(next - at >= before);
    CHECK(next - at <= 2s);
    before = next - at;
    at = next;
    turns.took(3ms, at);
    CHECK(turns.are_slow(at));
  }
  CHECK(before == 2s);
}

TEST_CASE("turns: a quick one ends the sleeping, and one slow one after it begins it again") {
  Turns turns;
  for (int i = 0; i < 9; ++i) turns.took(3ms, kStart);
  const Clock::time_point later = tried_again(turns, kStart);
  turns.took(2us, later);
  CHECK_FALSE(turns.are_slow(kStart));
  turns.took(3ms, later);
  CHECK(turns.are_slow(later));
}

TEST_CASE("turns: once they have been quick for a while it all begins anew") {
  Turns turns;
  for (int i = 0; i < 9; ++i) turns.took(3ms, kStart);
  for (int i = 0; i < 9; ++i) turns.took(2us, kStart);
  turns.took(3ms, kStart);
  CHECK_FALSE(turns.are_slow(kStart));
  turns.took(3ms, kStart);
  CHECK(tried_again(turns, kStart) - kStart == 100ms);
}

TEST_CASE("pause: who waits for long naps, and looks once more between the nap's beginning and its sleep") {
  int n_begun = 0, n_slept = 0;
  struct Counted final : Nap {
    explicit Counted(int& n) : n_slept(n) {}
    void sleep() override { ++n_slept; }
    int& n_slept;
  };
  Pause pause(/*oversubscribed=*/true, {}, [&] {
    ++n_begun;
    return std::make_unique<Counted>(n_slept);
  });
  while (n_begun == 0) pause.step();
  CHECK(n_slept == 0);
  pause.step();
  CHECK(n_slept == 1);
  CHECK(n_begun == 1);
}
