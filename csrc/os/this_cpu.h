#pragma once

namespace samestep {

/// The CPU that the calling thread runs on, or -1 if unknown. Takes a few nanoseconds.
int this_cpu();

}  // namespace samestep
