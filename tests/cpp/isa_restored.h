#pragma once

#include "kernels/isa.h"

namespace samestep {

/// Back to the fastest instruction set when a test ends, however it ends.
struct IsaRestored {
  ~IsaRestored() { kernels::select_isa(kernels::supported_isas().back()); }
};

}  // namespace samestep
