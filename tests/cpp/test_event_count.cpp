#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "shm/event_count_waiter.h"
#include "shm/shm_header_exchange.h"
#include "shm/shm_region.h"
#include "shm/shm_transport.h"
#include "thread_peers.h"

using namespace samestep;

namespace {

constexpr int kSize = 3;

std::shared_ptr<ShmRegion> new_region() {
  constexpr std::size_t kPage = 4096;
  const std::size_t nbytes = ShmRegion::nbytes_for(kSize);
  const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kPage, nbytes)), std::free);
  std::memset(memory.get(), 0, nbytes);
  return std::make_shared<ShmRegion>(memory, kSize);
}

std::uint32_t epoch(const ShmRegion& region, int rank) { return region.event_count(rank).epoch.load(); }

}  // namespace

TEST_CASE("event count: a rank notifies the waiters of other ranks, and no others") {
  const auto region = new_region();
  region->notify(1);
  CHECK(epoch(*region, 0) == 0);
  {
    const EventCountWaiter one(region, 0);
    const EventCountWaiter again(region, 0);  // another thread of the rank
    region->notify(1);
    CHECK(epoch(*region, 0) == 1);
    CHECK(epoch(*region, 1) == 0);
    CHECK(epoch(*region, 2) == 0);
    region->notify(0);
    CHECK(epoch(*region, 0) == 1);
  }
  region->notify(1);
  CHECK(epoch(*region, 0) == 1);
  CHECK(region->all_waiters().n_waiters == 0);
}

TEST_CASE("event count: every store for other ranks notifies them") {
  const auto region = new_region();
  const auto state = std::make_shared<ThreadPeers::SharedState>();
  const auto peers = [&](int rank) { return std::make_shared<ThreadPeers>(state, rank, kSize, Reach::none); };
  const EventCountWaiter waiter(region, 0);
  std::uint32_t before = 0;
  const auto notified = [&] { return epoch(*region, 0) != std::exchange(before, epoch(*region, 0)); };

  ShmHeaderExchange header_exchange(region, 1);
  header_exchange.post(0, 7, {}, {});
  CHECK(notified());
  ShmHeaderExchange late(region, 2);
  late.post(0, 7, {}, {});
  ShmHeaderExchange mine(region, 0);
  mine.post(0, 7, {}, {});
  notified();
  REQUIRE(header_exchange.complete(0));
  CHECK_FALSE(notified());
  header_exchange.release(0);
  CHECK(notified());
  region->set_step(0, 1, 1);
  CHECK(notified());

  ShmTransport theirs(region, peers(1), {0, 1, 2}, 1), here(region, peers(0), {0, 1, 2}, 0);
  const std::array<std::byte, 8> bytes{};
  REQUIRE(theirs.send_inline(bytes, bytes, 0, 5));
  CHECK(notified());
  REQUIRE(here.send_inline(bytes, bytes, 1, 5));
  CHECK_FALSE(notified());
  REQUIRE_FALSE(theirs.peek(0, 5).empty());
  theirs.consume(0);
  CHECK(notified());

  header_exchange.leave(1, Departure::of(Departure::Why::failed, 0, "it is over"));
  CHECK(notified());
}

TEST_CASE("event count: a sleeping rank is woken by the store it waits for") {
  const auto region = new_region();
  constexpr std::uint64_t kSteps = 200;
  std::thread other([&] {
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      while (!region->is_at(0, 0, step)) std::this_thread::yield();
      region->set_step(0, 1, step);
    }
  });
  EventCountWaiter waiter(region, 0);
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    region->set_step(0, 0, step);
    while (!region->is_at(0, 1, step)) waiter.sleep();
  }
  other.join();
}

TEST_CASE("shm region: a step counts for its own operation alone, whatever the slot held before") {
  constexpr std::uint64_t wrap = std::uint64_t{1} << 40;
  for (const std::uint64_t number : {std::uint64_t{ShmRegion::kSlots}, wrap / 2 + 5, wrap - 1, wrap, 3 * wrap + 7}) {
    CAPTURE(number);
    const auto region = new_region();
    CHECK_FALSE(region->is_at(number, 0, 1));  // the slot is unused: all operations before were small
    region->set_step(number - ShmRegion::kSlots, 0, ShmRegion::kLastStep);
    CHECK_FALSE(region->is_at(number, 0, 1));
    region->set_step(number, 0, 1);
    CHECK(region->is_at(number, 0, 1));
    CHECK_FALSE(region->is_at(number, 0, 2));
    region->set_step(number, 0, ShmRegion::kLastStep);
    CHECK(region->is_at(number, 0, 1));
    CHECK(region->is_at(number, 0, ShmRegion::kLastStep));
  }
}
