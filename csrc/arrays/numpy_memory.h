#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "shm/shared_heap.h"

namespace samestep {

/// NumPy's memory for array data, from a heap: what `shared_arrays=True` installs.
///
/// NumPy keeps its memory handler in a context variable (NEP 49): it serves the context in which it was installed and
/// contexts copied from that one. A new thread begins with NumPy's own. An array holds the handler that made it, which
/// thus lives as long as the last such array or context.
class NumpyMemory {
 public:
  /// Smaller blocks are left to the handler that was there before.
  static constexpr std::size_t kMinBytes = 64 << 10;

  /// Installs the handler in the current context. Throws UnavailableError if this NumPy has another interface.
  explicit NumpyMemory(std::shared_ptr<SharedHeap> heap);

  /// New arrays get their memory where they did before, in any context; the previous handler is back in the current
  /// one. Arrays that live stay as they are. Idempotent.
  void remove();

 private:
  pybind11::object handler_;
};

}  // namespace samestep
