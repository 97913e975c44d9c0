#include <pybind11/pybind11.h>
#include <unistd.h>

#include <type_traits>

// Python up to 3.13 ends a thread that asks for the GIL while the interpreter ends, by unwinding its stack: destructors
// would use Python without the GIL, and those that ask for the GIL themselves would abort the process. Here such a
// thread waits for the end of the process instead, as it does since Python 3.14. The linker sends our calls, and those
// of pybind11, of the functions below to this file (`--wrap` in CMakeLists.txt): they ask for the GIL, or run code that
// is written in Python. Python 3.10 has PyObject_CallOneArg and PyObject_Vectorcall in its headers alone, so that they
// are not guarded there: hence weak symbols.

namespace {

/// Stops an unwinding in the first frame of ours that it meets; Python's functions throw no exceptions. No handler, as
/// that would end the process where another exception is being handled.
struct StaysHere {
  bool returned = false;
  ~StaysHere() {
    while (!returned) pause();
  }
};

template <class Call>
auto guarded(Call call) {
  StaysHere unless_it_returns;
  if constexpr (std::is_void_v<decltype(call())>) {
    call();
    unless_it_returns.returned = true;
  } else {
    const auto result = call();
    unless_it_returns.returned = true;
    return result;
  }
}

}  // namespace

#define SAMESTEP_GUARDED(Result, function, parameters, arguments) \
  [[gnu::weak]] Result __real_##function parameters;              \
  Result __wrap_##function parameters {                           \
    return guarded([&] { return __real_##function arguments; });  \
  }

extern "C" {
SAMESTEP_GUARDED(void, PyEval_RestoreThread, (PyThreadState * state), (state))
SAMESTEP_GUARDED(void, PyEval_AcquireThread, (PyThreadState * state), (state))
SAMESTEP_GUARDED(PyGILState_STATE, PyGILState_Ensure, (), ())
SAMESTEP_GUARDED(PyObject*, PyObject_Call, (PyObject * function, PyObject* arguments, PyObject* keywords),
                 (function, arguments, keywords))
SAMESTEP_GUARDED(PyObject*, PyObject_CallObject, (PyObject * function, PyObject* arguments), (function, arguments))
SAMESTEP_GUARDED(PyObject*, PyObject_GetAttr, (PyObject * object, PyObject* name), (object, name))
SAMESTEP_GUARDED(PyObject*, PyObject_GetAttrString, (PyObject * object, const char* name), (object, name))
SAMESTEP_GUARDED(int, PyObject_HasAttrString, (PyObject * object, const char* name), (object, name))
SAMESTEP_GUARDED(int, PyObject_GetBuffer, (PyObject * object, Py_buffer* buffer, int flags), (object, buffer, flags))
SAMESTEP_GUARDED(PyObject*, PyObject_Str, (PyObject * object), (object))
SAMESTEP_GUARDED(PyObject*, PyObject_Repr, (PyObject * object), (object))
SAMESTEP_GUARDED(PyObject*, PyImport_ImportModule, (const char* name), (name))
SAMESTEP_GUARDED(PyObject*, PyObject_CallOneArg, (PyObject * function, PyObject* argument), (function, argument))
SAMESTEP_GUARDED(PyObject*, PyObject_Vectorcall,
                 (PyObject * function, PyObject* const* arguments, std::size_t n_arguments, PyObject* names),
                 (function, arguments, n_arguments, names))
}
