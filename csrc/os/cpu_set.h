#pragma once

namespace samestep {

/// CPUs this process may run on at once: its affinity mask, bounded by the CPU quota of its control
/// group (version 2), at least 1.
int usable_cpus();

/// The CPU that this thread runs on, as it asks; -1 where that is unknown. A few nanoseconds.
int this_cpu();

}  // namespace samestep
