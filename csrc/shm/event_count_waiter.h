#pragma once

#include <cstdint>
#include <memory>

#include "shm/shm_region.h"
#include "waiting/backoff.h"

namespace samestep {

/// Sleeps until another rank of the region notifies this rank's event count.
class EventCountWaiter final : public Waiter {
 public:
  EventCountWaiter(std::shared_ptr<ShmRegion> region, int rank);
  ~EventCountWaiter() override;
  EventCountWaiter(const EventCountWaiter&) = delete;
  EventCountWaiter& operator=(const EventCountWaiter&) = delete;

  void sleep() override;

 private:
  std::shared_ptr<ShmRegion> region_;
  ShmRegion::EventCount& event_count_;
  std::uint32_t epoch_;  // read before the caller last checked its condition
};

}  // namespace samestep
