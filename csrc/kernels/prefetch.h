#pragma once

#include <cstddef>

namespace samestep::kernels {

/// Asks for memory that will be written soon, so that its cache lines are taken from other CPUs meanwhile. A hint.
inline void prefetch_for_write(const void* memory, std::size_t nbytes) {
  constexpr std::size_t kLine = 64;
  const auto* const bytes = static_cast<const char*>(memory);
  for (std::size_t i = 0; i < nbytes; i += kLine) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(bytes[i]));  // the builtin is this only where the compiler's target has it
#else
    __builtin_prefetch(bytes + i, 1);
#endif
  }
}

/// Asks that cache lines just written move to where other CPUs find them sooner. A hint, no fence: processors without
/// the instruction take it for a no-operation.
inline void demote_lines(const void* memory, std::size_t nbytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  const auto* const bytes = static_cast<const char*>(memory);
  for (std::size_t i = 0; i < nbytes; i += kLine) {
    asm volatile(".byte 0x0f, 0x1c, 0x00" : : "a"(bytes + i) : "memory");  // cldemote (%rax), for older assemblers
  }
#else
  (void)memory, (void)nbytes;
#endif
}

}  // namespace samestep::kernels
