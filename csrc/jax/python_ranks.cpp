#include "jax/python_ranks.h"

#include <Python.h>

#include "core/error.h"

namespace samestep {
namespace {

// XLA calls on a thread of its choice, which may be unknown to Python; PyGILState handles both kinds.
struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  Gil() = default;
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil() { PyGILState_Release(state); }
};

struct DropReference {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Reference = std::unique_ptr<PyObject, DropReference>;

/// Takes Python's error, and throws it.
[[noreturn]] void throw_python_error() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Reference first(type), second(value), third(trace);
  const Reference text(value != nullptr ? PyObject_Str(value) : nullptr);
  const char* const utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  const std::string message = utf8 != nullptr ? utf8 : "an error without a text";
  PyErr_Clear();
  throw UnavailableError("samestep.jax cannot start: " + message);
}

Reference checked(PyObject* object) {
  if (object == nullptr) throw_python_error();
  return Reference(object);
}

}  // namespace

std::unique_ptr<DeviceRanks> open_device_ranks() {
  const Gil gil;
  const Reference module = checked(PyImport_ImportModule("samestep.jax.bootstrap"));
  const Reference opened = checked(PyObject_CallMethod(module.get(), "open_ranks", nullptr));
  void* const held = PyCapsule_GetPointer(PyTuple_GetItem(opened.get(), 0), RanksCapsule::kName);
  if (held == nullptr) throw_python_error();
  const double timeout = PyFloat_AsDouble(PyTuple_GetItem(opened.get(), 1));
  // An error of the conversion stays set.
  if (PyErr_Occurred() != nullptr) throw_python_error();
  return std::make_unique<DeviceRanks>(*static_cast<RanksCapsule*>(held), Seconds(timeout));
}

std::string problem_of_programs() {
  const Gil gil;
  const Reference module = checked(PyImport_ImportModule("samestep.jax.programs"));
  const Reference problem = checked(PyObject_CallMethod(module.get(), "problem", nullptr));
  const char* const text = PyUnicode_AsUTF8(problem.get());
  if (text == nullptr) throw_python_error();
  return text;
}

}  // namespace samestep
