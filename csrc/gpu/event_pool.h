#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/gpu_memory.h"

namespace samestep {

/// A pool of events of one device: to create one takes a call of the driver.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(std::shared_ptr<GpuLibrary> gpu, int device) : gpu_(std::move(gpu)), device_(device) {}

  /// An event, which returns to the pool when the last pointer is dropped.
  std::shared_ptr<GpuEvent> take() {
    std::unique_ptr<GpuEvent> event;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (event == nullptr) event = std::make_unique<GpuEvent>(gpu_, device_);
    return {event.release(), [self = shared_from_this()](GpuEvent* used) {
              const std::lock_guard lock(self->mutex_);
              self->free_.emplace_back(used);
            }};
  }

  /// Events for the work that each of `streams` has so far.
  std::vector<std::shared_ptr<GpuEvent>> record(const std::vector<StreamHandle>& streams) {
    std::vector<std::shared_ptr<GpuEvent>> recorded;
    std::vector<StreamHandle> seen{kNoStream};
    for (const StreamHandle stream : streams) {
      if (std::ranges::find(seen, stream) != seen.end()) continue;
      seen.push_back(stream);
      recorded.push_back(take());
      recorded.back()->record(reinterpret_cast<GpuLibrary::Stream>(stream));
    }
    return recorded;
  }

 private:
  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<GpuEvent>> free_;
};

}  // namespace samestep
