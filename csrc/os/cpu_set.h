#pragma once

namespace samestep {

/// Number of CPUs that this process may use: its affinity mask, limited by the CPU quota of its control group
/// (version 2), at least 1.
int usable_cpus();

/// The CPU that the calling thread runs on, or -1 if unknown. Takes a few nanoseconds.
int this_cpu();

}  // namespace samestep
