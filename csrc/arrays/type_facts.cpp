#include <array>
#include <mutex>

#include "arrays/array_sources.h"
#include "arrays/free_threading.h"

namespace samestep::sources {

namespace py = pybind11;

namespace {

constexpr int kMaxOlderTables = 16;  // a table that names itself as the one before must not be followed for ever

// Whether `type` derives from module.name; false while nobody has imported the module.
bool derives_from(PyTypeObject* type, const char* module, const char* name) {
  // Never imports: a type that derives from a class of the module can exist only after something else has imported it.
  const auto loaded = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str(module).ptr()));
  if (!loaded) PyErr_Clear();
  if (!loaded || !PyObject_HasAttrString(loaded.ptr(), name)) return false;
  const py::object base = loaded.attr(name);
  return PyType_Check(base.ptr()) && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(base.ptr()));
}

const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  const auto capsule = py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* header = static_cast<dlpack::ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  // A library of a newer major links the table of an older one behind its own.
  for (int older = 0; header && header->version.major != 1; ++older) {
    header = older < kMaxOlderTables ? header->previous : nullptr;
  }
  const auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  return api != nullptr && api->export_managed != nullptr ? api : nullptr;
}

// The C function behind a method without arguments: calling it directly saves a quarter of the time.
PyCFunction c_method(PyTypeObject* type, const char* name) {
  const auto method = py::getattr(reinterpret_cast<PyObject*>(type), name, py::none());
  // A method that is written in Python, as an override in a subclass may be, has to be called as Python calls it.
  if (!PyObject_TypeCheck(method.ptr(), &PyMethodDescr_Type)) return nullptr;
  const PyMethodDef* def = reinterpret_cast<PyMethodDescrObject*>(method.ptr())->d_method;
  return def->ml_flags == METH_NOARGS ? def->ml_meth : nullptr;
}

// Apart from `facts_of`, whose every call would save the registers that only this needs.
[[gnu::noinline]] TypeFacts find_out(PyTypeObject* type) {
  TypeFacts facts;
  facts.type = type;
  facts.exchange = exchange_api(type);
  facts.torch = derives_from(type, "torch", "Tensor");
  if (facts.torch) {
    facts.is_conj = c_method(type, "is_conj");
    facts.is_neg = c_method(type, "is_neg");
  }
  facts.names_stream =
      derives_from(type, "cupy", "ndarray") || derives_from(type, "samestep.gpu.device_array", "DeviceArray");
  const auto module = py::getattr(reinterpret_cast<PyObject*>(type), "__module__", py::none());
  facts.jax = py::isinstance<py::str>(module) && module.cast<std::string>().starts_with("jax");
  facts.becomes_jax = derives_from(type, "samestep.arrays.of_jax", "UnsharedJaxArray");
  facts.masked = derives_from(type, "numpy.ma", "MaskedArray");
  facts.numpy_scalar = derives_from(type, "numpy", "generic");
  constinit static CachedAttribute written_in_place("samestep.arrays.libraries", "written_in_place");
  const py::object answer = py::handle(written_in_place.get())(py::handle(reinterpret_cast<PyObject*>(type)));
  facts.known_mutable = facts.torch || answer.is(py::bool_(true));
  facts.never_written = !facts.torch && answer.is(py::bool_(false));
  return facts;
}

}  // namespace

TypeFacts facts_of(PyTypeObject* type) {
  constinit static PythonMutex mutex;  // of the cache
  constinit static std::array<TypeFacts, 8> cache;
  constinit static std::size_t oldest = 0;
  {
    const std::lock_guard lock(mutex);
    for (const TypeFacts& facts : cache) {
      if (facts.type == type) return facts;
    }
  }
  // Another thread may find out the same meanwhile. That a type is listed twice does no harm.
  const TypeFacts facts = find_out(type);
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // a listed address must not be reused for another type
  PyTypeObject* evicted = nullptr;
  {
    const std::lock_guard lock(mutex);
    // The slot is complete before the old type loses its reference: to drop a type may run code that comes back here.
    TypeFacts& slot = cache[oldest];
    oldest = (oldest + 1) % cache.size();
    evicted = std::exchange(slot, facts).type;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(evicted));
  return facts;
}

}  // namespace samestep::sources
