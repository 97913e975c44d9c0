#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "node/arena.h"
#include "node/line_meeting.h"
#include "node/mailbox.h"
#include "node/nap_at_bell.h"
#include "thread_host.h"

using namespace samestep;

namespace {

constexpr int kSize = 3;

std::shared_ptr<Arena> new_arena() {
  constexpr std::size_t kPage = 4096;
  const std::size_t nbytes = Arena::nbytes_for(kSize);
  const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kPage, nbytes)), std::free);
  std::memset(memory.get(), 0, nbytes);
  return std::make_shared<Arena>(memory, kSize);
}

std::uint32_t rung(const Arena& arena, int rank) { return arena.bell(rank).rung.load(); }

}  // namespace

TEST_CASE("bells: those of other ranks that sleep are rung, and no others") {
  const auto arena = new_arena();
  arena->ring_bells(1);
  CHECK(rung(*arena, 0) == 0);
  {
    const NapAtBell one(arena, 0);
    const NapAtBell again(arena, 0);  // another thread of the rank
    arena->ring_bells(1);
    CHECK(rung(*arena, 0) == 1);
    CHECK(rung(*arena, 1) == 0);
    CHECK(rung(*arena, 2) == 0);
    arena->ring_bells(0);
    CHECK(rung(*arena, 0) == 1);
  }
  arena->ring_bells(1);
  CHECK(rung(*arena, 0) == 1);
  CHECK(arena->all_asleep().n_asleep == 0);
}

TEST_CASE("bells: whatever a rank stores for others rings") {
  const auto arena = new_arena();
  const auto house = std::make_shared<ThreadHost::House>();
  const auto host = [&](int rank) { return std::make_shared<ThreadHost>(house, rank, kSize, Reach::none); };
  const NapAtBell nap(arena, 0);
  std::uint32_t before = 0;
  const auto rang = [&] { return rung(*arena, 0) != std::exchange(before, rung(*arena, 0)); };

  LineMeeting meeting(arena, 1);
  meeting.announce(0, 7, {}, {});
  CHECK(rang());
  LineMeeting late(arena, 2);
  late.announce(0, 7, {}, {});
  LineMeeting mine(arena, 0);
  mine.announce(0, 7, {}, {});
  rang();
  REQUIRE(meeting.complete(0));
  CHECK_FALSE(rang());
  meeting.release(0);
  CHECK(rang());
  arena->set_step(0, 1, 1);
  CHECK(rang());

  Mailbox theirs(arena, host(1), {0, 1, 2}, 1), here(arena, host(0), {0, 1, 2}, 0);
  const std::array<std::byte, 8> bytes{};
  REQUIRE(theirs.send_at_once(bytes, bytes, 0, 5));
  CHECK(rang());
  REQUIRE(here.send_at_once(bytes, bytes, 1, 5));
  CHECK_FALSE(rang());
  REQUIRE_FALSE(theirs.peek(0, 5).empty());
  theirs.skip(0);
  CHECK(rang());

  meeting.leave(1, "it is over");
  CHECK(rang());
}

TEST_CASE("bells: who sleeps is woken by what it waits for") {
  const auto arena = new_arena();
  constexpr std::uint64_t kSteps = 200;
  std::thread other([&] {
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      while (!arena->is_at(0, 0, step)) std::this_thread::yield();
      arena->set_step(0, 1, step);
    }
  });
  NapAtBell nap(arena, 0);
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    arena->set_step(0, 0, step);
    while (!arena->is_at(0, 1, step)) nap.sleep();
  }
  other.join();
}
