#include "os/this_cpu.h"

#include <sched.h>

namespace samestep {

int this_cpu() { return ::sched_getcpu(); }

}  // namespace samestep
