#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace samestep {

// Python up to 3.13 ends a thread that asks for the GIL while the interpreter ends, by unwinding its stack: destructors
// would use Python without the GIL, and one that asks for the GIL itself would abort the process. Here such a thread
// waits for the end of the process instead, as it does since Python 3.14. pybind11's classes do not.

/// Keeps a thread whose stack is unwound by Python, not by an exception, for good. A destructor does it: a handler
/// would end the process where another exception is being handled.
class StaysHere {
 public:
  StaysHere() = default;
  ~StaysHere() {
    if (!returned_ && std::uncaught_exceptions() == before_) stay();
  }
  StaysHere(const StaysHere&) = delete;
  StaysHere& operator=(const StaysHere&) = delete;
  void note_return() { returned_ = true; }

 private:
  static void stay();
  const int before_ = std::uncaught_exceptions();
  bool returned_ = false;
};

/// Calls what may run Python code, and so ask for the GIL. Not inlined into destructors: those are noexcept, and there
/// the compiler need not clean up before it ends the process.
template <class Call>
[[gnu::noinline]] auto call_python(Call call) {
  StaysHere unless_it_returns;
  auto result = call();
  unless_it_returns.note_return();
  return result;
}

/// The GIL is released during its lifetime.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

/// The GIL is held during its lifetime, by any thread.
class WithGil {
 public:
  WithGil();
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace samestep
