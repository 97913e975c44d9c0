#include "shm/event_count_waiter.h"

#include <chrono>
#include <utility>

#include "os/futex.h"

namespace samestep {

EventCountWaiter::EventCountWaiter(std::shared_ptr<ShmRegion> region, int rank)
    : region_(std::move(region)),
      event_count_(region_->event_count(rank)),
      epoch_(event_count_.epoch.load(std::memory_order_relaxed)) {  // relaxed: an old one only shortens the sleep
  event_count_.n_waiters.fetch_add(1, std::memory_order_relaxed);   // ordered by the next line
  // Orders the count before the caller's check of its condition. The notifier has no such fence, so a wake-up can be
  // lost.
  region_->all_waiters().n_waiters.fetch_add(1, std::memory_order_seq_cst);
}

EventCountWaiter::~EventCountWaiter() {  // relaxed: a count that is too high costs a needless wake-up
  region_->all_waiters().n_waiters.fetch_sub(1, std::memory_order_relaxed);
  event_count_.n_waiters.fetch_sub(1, std::memory_order_relaxed);
}

void EventCountWaiter::sleep() {
  // This bounds what a lost wake-up costs.
  constexpr std::chrono::microseconds kMaxSleep{500};
  futex_wait(event_count_.epoch, epoch_, kMaxSleep);
  epoch_ = event_count_.epoch.load(std::memory_order_acquire);  // pairs with ShmRegion::wake_waiters
}

}  // namespace samestep
