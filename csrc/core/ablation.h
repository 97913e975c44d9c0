#pragma once

#include "core/mechanism.h"

namespace samestep {

/// True: the compiler sees that every mechanism is in use. The build of benchmarks/ablation.py includes
/// benchmarks/switches/core/ablation.h instead of this file.
constexpr bool is_enabled(Mechanism) { return true; }

}  // namespace samestep
