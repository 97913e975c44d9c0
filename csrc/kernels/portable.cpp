#define SAMESTEP_ISA portable
#include "kernels/isa_body.h"
