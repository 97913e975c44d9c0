#include "node/nap_at_bell.h"

#include <chrono>
#include <utility>

#include "os/futex.h"

namespace samestep {

NapAtBell::NapAtBell(std::shared_ptr<Arena> arena, int rank)
    : arena_(std::move(arena)), bell_(arena_->bell(rank)), heard_(bell_.rung.load(std::memory_order_relaxed)) {
  bell_.n_asleep.fetch_add(1, std::memory_order_relaxed);
  arena_->all_asleep().n_asleep.fetch_add(1, std::memory_order_seq_cst);
}

NapAtBell::~NapAtBell() {
  arena_->all_asleep().n_asleep.fetch_sub(1, std::memory_order_relaxed);
  bell_.n_asleep.fetch_sub(1, std::memory_order_relaxed);
}

void NapAtBell::sleep() {
  constexpr std::chrono::microseconds kMost{500};
  futex_wait(bell_.rung, heard_, kMost);
  heard_ = bell_.rung.load(std::memory_order_acquire);
}

}  // namespace samestep
