#pragma once

#include <atomic>
#include <cstdint>

#include "core/mechanism.h"

namespace samestep {

// This file takes the place of csrc/core/ablation.h in a build with SAMESTEP_ABLATION.

/// Bit i set: mechanism i is off. All ranks set the same value, between operations.
extern "C" {
[[gnu::visibility("default"), gnu::used]] inline std::atomic<std::uint64_t> samestep_ablated{0};
}

inline bool is_enabled(Mechanism mechanism) {
  return (samestep_ablated.load(std::memory_order_relaxed) >> static_cast<unsigned>(mechanism) & 1) == 0;
}

}  // namespace samestep
