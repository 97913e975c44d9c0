#include "engine/family.h"

#include <algorithm>

#include "engine/progress_engine.h"

namespace samestep {

void Family::add(const std::shared_ptr<ProgressEngine>& engine) {
  const std::lock_guard lock(mutex_);
  std::erase_if(engines_, [](const auto& one) { return one.expired(); });
  engines_.push_back(engine);
}

void Family::leave(const std::exception_ptr& error, const Departure& why) {
  // A copy, so that this mutex is free while an engine leaves: engines call `is_open` with their own mutex held, and
  // two threads that lock in opposite orders would wait for each other forever.
  std::vector<std::weak_ptr<ProgressEngine>> progress_engines;
  {
    const std::lock_guard lock(mutex_);
    progress_engines = engines_;
  }
  for (const auto& weak : progress_engines) {
    const std::shared_ptr<ProgressEngine> engine = weak.lock();
    if (engine != nullptr) engine->leave(error, why);
  }
}

void Family::open_block(std::uint64_t block) {
  const std::lock_guard lock(mutex_);
  blocks_.push_back(block);
  n_open_blocks_.store(blocks_.size(), std::memory_order_relaxed);  // relaxed: see has_open_blocks
}

void Family::close_block(std::uint64_t block) {
  const std::lock_guard lock(mutex_);
  std::erase(blocks_, block);
  n_open_blocks_.store(blocks_.size(), std::memory_order_relaxed);  // relaxed: see has_open_blocks
}

bool Family::is_open(std::uint64_t block) {
  const std::lock_guard lock(mutex_);
  return std::ranges::find(blocks_, block) != blocks_.end();
}

}  // namespace samestep
