#pragma once

namespace samestep {

/// CPUs this process may run on at once: its affinity mask, bounded by the CPU quota of its control
/// group (version 2), at least 1.
int usable_cpus();

}  // namespace samestep
