// Stands in for csrc/node/shared_heap.cpp: ranks of the exploration have no heap.

#include "node/shared_heap.h"

namespace samestep {

SharedHeap::Block SharedHeap::allocate(std::size_t) { return {}; }
bool SharedHeap::free(void*) { return false; }

}  // namespace samestep
