// Methods of Python classes with a fast path in C. `FastGroup` is a base class that keeps what these calls need in its
// C struct; `fast_method` is a decorator whose result is what the class has, a subclass overrides and a mock replaces.

#include "calls/fast_method.h"

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <atomic>
#include <cstddef>
#include <new>
#include <type_traits>

#include "arrays/free_threading.h"
#include "calls/python_errors.h"

namespace samestep {

namespace py = pybind11;

namespace {

// How objects with one reference to another, the member `held`, are collected.

template <class T, PyObject* T::* held>
int gc_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<T*>(self)->*held);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

template <class T, PyObject* T::* held>
int gc_clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<T*>(self)->*held);
  return 0;
}

template <class T, PyObject* T::* held>
void gc_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  // First, because the collector must not visit an object whose fields are being cleared.
  PyObject_GC_UnTrack(self);
  gc_clear<T, held>(self);
  if constexpr (requires(T& object) { object.communicator; }) reinterpret_cast<T*>(self)->communicator.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

struct FastGroup {
  PyObject ob_base;
  PyObject* held;                              // what `_comm` was set to
  std::shared_ptr<Communicator> communicator;  // null if `held` is something else, as in tests
  std::atomic<double> timeout;                 // relaxed: publishes no other data
};
PyTypeObject* group_type = nullptr;

FastGroup& group_of(PyObject* self) { return *reinterpret_cast<FastGroup*>(self); }

PyObject* group_new(PyTypeObject* type, PyObject* /*args*/, PyObject* /*keywords*/) {
  PyObject* const self = type->tp_alloc(type, 0);
  // The other fields are valid as zeros, which `tp_alloc` leaves there.
  if (self != nullptr) new (&group_of(self).communicator) std::shared_ptr<Communicator>();
  return self;
}

PyObject* get_comm(PyObject* self, void* /*closure*/) {
  const py::scoped_critical_section lock(self);  // against `set_comm`
  PyObject* const held = group_of(self).held;
  if (held == nullptr) PyErr_SetString(PyExc_AttributeError, "_comm");
  return Py_XNewRef(held);
}

int set_comm(PyObject* self, PyObject* value, void* /*closure*/) {
  FastGroup& group = group_of(self);
  std::shared_ptr<Communicator> communicator;
  if (value != nullptr && py::isinstance<Communicator>(py::handle(value))) {
    communicator = py::handle(value).cast<std::shared_ptr<Communicator>>();
    communicator->set_timeout(group.timeout.load(std::memory_order_relaxed));  // relaxed: see `timeout`
  }
  PyObject* before = nullptr;
  {
    const py::scoped_critical_section lock(self);  // against `get_comm` and `communicator_of`
    // Both fields change before the old values are dropped: destructors may run code that reads this group.
    group.communicator.swap(communicator);
    before = std::exchange(group.held, Py_XNewRef(value));
  }
  Py_XDECREF(before);
  return 0;
}

/// Without the GIL another thread may replace the communicator meanwhile, and the call needs a reference of its own.
using CallsCommunicator =
    std::conditional_t<kFreeThreaded, std::shared_ptr<Communicator>, const std::shared_ptr<Communicator>&>;
CallsCommunicator communicator_of(PyObject* self) {
  const py::scoped_critical_section lock(self);  // against `set_comm`
  return group_of(self).communicator;
}

double timeout_of(PyObject* self) {
  return group_of(self).timeout.load(std::memory_order_relaxed);  // relaxed: see `timeout`
}

PyObject* get_timeout(PyObject* self, void* /*closure*/) { return PyFloat_FromDouble(timeout_of(self)); }

int set_timeout(PyObject* self, PyObject* value, void* /*closure*/) {
  const double seconds = value == nullptr ? -1.0 : PyFloat_AsDouble(value);
  if (PyErr_Occurred() != nullptr) return -1;
  group_of(self).timeout.store(seconds, std::memory_order_relaxed);  // relaxed: see `timeout`
  if (const std::shared_ptr<Communicator> communicator = communicator_of(self)) communicator->set_timeout(seconds);
  return 0;
}

PyGetSetDef group_fields[] = {
    {"_comm", &get_comm, &set_comm, "The communicator.", nullptr},
    {"_timeout", &get_timeout, &set_timeout, "Seconds that an operation may take.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

template <typename T>
void* slot(T* function) {
  return reinterpret_cast<void*>(function);
}

PyType_Slot group_slots[] = {
    {Py_tp_doc, const_cast<char*>("A group as the fast methods see it: a communicator and a timeout.")},
    {Py_tp_new, slot(&group_new)},
    {Py_tp_dealloc, slot(&gc_dealloc<FastGroup, &FastGroup::held>)},
    {Py_tp_traverse, slot(&gc_traverse<FastGroup, &FastGroup::held>)},
    {Py_tp_clear, slot(&gc_clear<FastGroup, &FastGroup::held>)},
    {Py_tp_getset, group_fields},
    {0, nullptr},
};
PyType_Spec group_spec = {"samestep._core.FastGroup", sizeof(FastGroup), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, group_slots};

/// A method: the fast path, and the Python function that takes all other calls and has name, texts and signature.
struct FastMethod {
  PyObject ob_base;
  vectorcallfunc vectorcall;
  PyObject* function;
  FastAttempt attempt;
};
PyTypeObject* method_type = nullptr;

FastMethod& method_of(PyObject* self) { return *reinterpret_cast<FastMethod*>(self); }

/// Whether this is a FastGroup. A class is remembered by its version tag, which no other class ever has: to go through
/// its bases takes some 8 ns.
bool is_fast_group(PyObject* object) {
  constinit static std::atomic<unsigned int> known = 0;
  PyTypeObject* const type = Py_TYPE(object);
  // relaxed, as for `known`: publishes no other data. Another thread may just give the class its tag.
  const unsigned int tag = std::atomic_ref(type->tp_version_tag).load(std::memory_order_relaxed);
  // Zero is no tag: CPython assigns tags when attributes are looked up, and may run out of them.
  if (tag != 0 && tag == known.load(std::memory_order_relaxed)) return true;  // relaxed: see above
  if (!PyType_IsSubtype(type, group_type)) return false;
  known.store(tag, std::memory_order_relaxed);  // relaxed: see above
  return true;
}

PyObject* call_method(PyObject* self, PyObject* const* args, std::size_t n_args_and_flag, PyObject* keywords) {
  const FastMethod& method = method_of(self);
  const Py_ssize_t n_args = PyVectorcall_NARGS(n_args_and_flag);
  if (n_args > 0 && is_fast_group(args[0])) {
    try {
      CallsCommunicator communicator = communicator_of(args[0]);
      PyObject* const result =
          communicator == nullptr ? nullptr
                                  : method.attempt({communicator, timeout_of(args[0])}, args + 1, n_args - 1, keywords);
      // Null without an error: the fast path has declined, and nothing has been sent.
      if (result != nullptr || PyErr_Occurred() != nullptr) return result;
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(method.function, args, n_args_and_flag, keywords);
}

PyObject* method_get(PyObject* self, PyObject* object, PyObject* /*type*/) {
  // Binds as a function does. Calls of methods skip this (Py_TPFLAGS_METHOD_DESCRIPTOR).
  return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

/// Names, texts and all else are those of the function.
PyObject* method_attribute(PyObject* self, void* name) {
  return PyObject_GetAttrString(method_of(self).function, static_cast<const char*>(name));
}

int set_method_attribute(PyObject* self, PyObject* value, void* name) {
  return PyObject_SetAttrString(method_of(self).function, static_cast<const char*>(name), value);
}

PyObject* method_wrapped(PyObject* self, void* /*closure*/) { return Py_NewRef(method_of(self).function); }

PyObject* method_repr(PyObject* self) { return PyUnicode_FromFormat("<fast %R>", method_of(self).function); }

#define SAMESTEP_OF_FUNCTION(name) {name, &method_attribute, &set_method_attribute, nullptr, const_cast<char*>(name)}
PyGetSetDef method_fields[] = {
    SAMESTEP_OF_FUNCTION("__name__"),
    SAMESTEP_OF_FUNCTION("__qualname__"),
    SAMESTEP_OF_FUNCTION("__module__"),
    SAMESTEP_OF_FUNCTION("__doc__"),
    SAMESTEP_OF_FUNCTION("__annotations__"),
    {"__wrapped__", &method_wrapped, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
#undef SAMESTEP_OF_FUNCTION

PyMemberDef method_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastMethod, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot method_slots[] = {
    {Py_tp_call, slot(&PyVectorcall_Call)},
    {Py_tp_descr_get, slot(&method_get)},
    {Py_tp_repr, slot(&method_repr)},
    {Py_tp_dealloc, slot(&gc_dealloc<FastMethod, &FastMethod::function>)},
    {Py_tp_traverse, slot(&gc_traverse<FastMethod, &FastMethod::function>)},
    {Py_tp_clear, slot(&gc_clear<FastMethod, &FastMethod::function>)},
    {Py_tp_getset, method_fields},
    {Py_tp_members, method_members},
    {0, nullptr},
};
// Immutable: only then the interpreter remembers where it has found the method (LOAD_METHOD, since Python 3.11).
PyType_Spec method_spec = {"samestep._core.FastMethod", sizeof(FastMethod), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                               Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION |
                               Py_TPFLAGS_IMMUTABLETYPE,
                           method_slots};

py::object make_fast_method(const py::function& function) {
  const auto name = function.attr("__name__").cast<std::string>();
  FastAttempt attempt = find_fast_collective(name.c_str());
  if (attempt == nullptr) attempt = find_fast_message(name.c_str());
  if (attempt == nullptr) throw py::value_error("no fast path for a method named " + name);
  PyObject* const made = method_type->tp_alloc(method_type, 0);
  if (made == nullptr) throw py::error_already_set();
  FastMethod& method = method_of(made);
  method.vectorcall = &call_method;
  method.function = function.inc_ref().ptr();
  method.attempt = attempt;
  return py::reinterpret_steal<py::object>(made);
}

PyTypeObject* make_type(PyType_Spec& spec) {
  PyObject* const made = PyType_FromSpec(&spec);
  if (made == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(made);
}

}  // namespace

void bind_fast_methods(py::module_& m) {
  group_type = make_type(group_spec);
  method_type = make_type(method_spec);
  m.attr("FastGroup") = py::handle(reinterpret_cast<PyObject*>(group_type));
  m.def("fast_method", &make_fast_method, py::arg("function"),
        "A method of a FastGroup, by the name of `function`, which takes the calls that are not the common case.");
}

}  // namespace samestep
