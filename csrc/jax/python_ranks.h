#pragma once

#include <memory>

#include "jax/device_ranks.h"

namespace samestep {

/// Has Python bring the devices of the JAX program together (`samestep.jax.bootstrap`). Collective over its processes.
/// Throws UnavailableError with the text of Python's error.
std::unique_ptr<DeviceRanks> open_device_ranks();

}  // namespace samestep
