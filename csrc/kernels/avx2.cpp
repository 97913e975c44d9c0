#if defined(__x86_64__)  // other processors have the portable code only
#define SAMESTEP_ISA avx2
#include "kernels/isa_body.h"
#endif
