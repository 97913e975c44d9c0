#pragma once

#include <cstdint>
#include <memory>

#include "exchange/waiting.h"
#include "node/arena.h"

namespace samestep {

/// Sleeps until another rank of the arena rings this rank's bell.
class NapAtBell final : public Nap {
 public:
  NapAtBell(std::shared_ptr<Arena> arena, int rank);
  ~NapAtBell() override;
  NapAtBell(const NapAtBell&) = delete;
  NapAtBell& operator=(const NapAtBell&) = delete;

  void sleep() override;

 private:
  std::shared_ptr<Arena> arena_;
  Arena::Bell& bell_;
  std::uint32_t heard_;  // what `rung` was before the last look at what is waited for
};

}  // namespace samestep
