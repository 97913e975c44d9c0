#pragma once

#include <memory>
#include <string>

#include "jax/device_ranks.h"

namespace samestep {

/// Has Python bring the devices of the JAX program together (`samestep.jax.meeting`). Collective over its processes.
/// Throws UnavailableError with the text of Python's error.
std::unique_ptr<DeviceRanks> open_device_ranks();

/// Why no group can be made: a program of this process is over some of the devices only. Empty where there is none.
///
/// XLA tells MPI only the first device of a group and the caller's rank, and has the group's members alone call
/// MPI_Comm_split, in which MPI wants all processes. Without this the members would wait for the others until the
/// deadline.
std::string problem_of_programs();

}  // namespace samestep
