#pragma once

namespace samestep::kernels {

/// For loops that wait for another CPU: a few nanoseconds in which this one does little. A hint.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace samestep::kernels
