// Stands in for csrc/shm/shared_heap.cpp and csrc/os/futex.cpp: ranks of the exploration have no heap, and never
// sleep.

#include "os/futex.h"
#include "shm/shared_heap.h"

namespace samestep {

SharedHeap::Block SharedHeap::allocate(std::size_t) { return {}; }
bool SharedHeap::free(void*) { return false; }
void SharedHeap::withdraw(const void*, std::size_t) {}

void futex_wait(std::atomic<std::uint32_t>&, std::uint32_t, std::chrono::nanoseconds) {}
void futex_wake(std::atomic<std::uint32_t>&) {}

}  // namespace samestep
