#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <string>

#include "arrays/array_sources.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep::sources {

namespace py = pybind11;

namespace {

using Npy = py::detail::npy_api;

// In tables of element types: a DType, or this.
constexpr std::uint8_t kRefused = 254;

constexpr std::uint8_t code(DType dtype) { return static_cast<std::uint8_t>(dtype); }

// NumPy numbers C's types, not widths; `long` has 4 or 8 bytes.
constexpr auto kBuiltin = [] {
  // NPY_HALF, which pybind11 does not list.
  constexpr int kHalf = 23;
  std::array<std::uint8_t, kHalf + 1> table;
  table.fill(kRefused);
  table[Npy::NPY_BOOL_] = code(DType::bool_);
  table[Npy::NPY_BYTE_] = code(DType::int8);
  table[Npy::NPY_UBYTE_] = code(DType::uint8);
  table[Npy::NPY_SHORT_] = code(DType::int16);
  table[Npy::NPY_USHORT_] = code(DType::uint16);
  table[Npy::NPY_INT_] = code(DType::int32);
  table[Npy::NPY_UINT_] = code(DType::uint32);
  table[Npy::NPY_LONG_] = code(sizeof(long) == 8 ? DType::int64 : DType::int32);
  table[Npy::NPY_ULONG_] = code(sizeof(long) == 8 ? DType::uint64 : DType::uint32);
  table[Npy::NPY_LONGLONG_] = code(DType::int64);
  table[Npy::NPY_ULONGLONG_] = code(DType::uint64);
  table[kHalf] = code(DType::float16);
  table[Npy::NPY_FLOAT_] = code(DType::float32);
  table[Npy::NPY_DOUBLE_] = code(DType::float64);
  table[Npy::NPY_CFLOAT_] = code(DType::complex64);
  table[Npy::NPY_CDOUBLE_] = code(DType::complex128);
  return table;
}();

// ml_dtypes registers its types in an order that nobody can know, so they go by name.
std::uint8_t look_up_name(PyObject* descr) {
  const std::string wanted = py::str(py::handle(descr).attr("name"));
  for (const DType dtype : {DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2}) {
    if (name(dtype) == wanted) return code(dtype);
  }
  return kRefused;
}

// The type of a number that NumPy gave out at run time. Asking for the name takes a microsecond.
std::uint8_t registered(PyObject* descr, int type_num) {
  constexpr int kFirst = 256;
  // NumPy numbers registered types upwards in the order of registration, so that a number keeps its meaning.
  // Each is one more than the code, and 0 while it is unknown.
  constinit static std::array<std::atomic<std::uint8_t>, 64> known{};
  if (type_num < kFirst) return kRefused;
  const auto index = static_cast<std::size_t>(type_num - kFirst);
  if (index >= known.size()) return look_up_name(descr);
  // relaxed, also below: all threads find the same
  if (const std::uint8_t found = known[index].load(std::memory_order_relaxed); found != 0) return found - 1;
  const std::uint8_t found = look_up_name(descr);
  known[index].store(found + 1, std::memory_order_relaxed);  // relaxed: see above
  return found;
}

std::string cure(const py::detail::PyArrayDescr_Proxy& descr, bool native) {
  if (!native) return "convert with x.astype(x.dtype.newbyteorder('='))";
  switch (descr.type_num) {
    case Npy::NPY_LONGDOUBLE_:
      return "convert with x.astype(np.float64)";
    case Npy::NPY_CLONGDOUBLE_:
      return "convert with x.astype(np.complex128)";
    case Npy::NPY_VOID_:
      return "pass its fields one by one, or x.view(np.uint8) to move bytes";
  }
  if (descr.kind == 'M' || descr.kind == 'm') return "pass x.view(np.int64)";
  if (descr.kind == 'O' || descr.kind == 'S' || descr.kind == 'U' || descr.kind == 'T') {
    return "use an object verb such as bcast_object";
  }
  return "convert with x.astype(np.float32)";
}

DType dtype_of(PyObject* descr) {
  const auto* proxy = py::detail::array_descriptor_proxy(descr);
  constexpr char kForeign = std::endian::native == std::endian::little ? '>' : '<';
  const bool native = proxy->byteorder != kForeign;
  const auto index = static_cast<std::size_t>(proxy->type_num);
  const std::uint8_t found = index < kBuiltin.size() ? kBuiltin[index] : registered(descr, proxy->type_num);
  if (found != kRefused && native) return static_cast<DType>(found);
  throw InvalidArgumentError(str("dtype ", std::string(py::str(py::handle(descr))),
                                 native ? "" : " (foreign byte order)", " cannot be sent; ", kAcceptedTypes, "; ",
                                 cure(*proxy, native)));
}

void fill(PyObject* object, Array& out) {
  const auto* array = py::detail::array_proxy(object);
  require_dims(array->nd);
  ArrayView& view = out.mutable_view();
  view.data = array->data;
  view.dtype = dtype_of(array->descr);
  view.n_dims = array->nd;
  std::copy_n(array->dimensions, array->nd, view.shape);
  std::copy_n(array->strides, array->nd, view.strides);
  view.readonly = (array->flags & Npy::NPY_ARRAY_WRITEABLE_) == 0;
  measure(view);
  out.own_reference(object);
}

}  // namespace

bool read_numpy(PyObject* object, Array& out) {
  const Npy& numpy = Npy::get();
  if (!numpy.PyArray_Check_(object)) return false;
  // Plain arrays, the common case, skip the search for facts about their type.
  if (Py_TYPE(object) != numpy.PyArray_Type_ && facts_of(Py_TYPE(object)).masked) {
    throw InvalidArgumentError(
        "a masked array would be sent without its mask; pass x.filled(value), or x.data and x.mask one by one");
  }
  fill(object, out);
  return true;
}

bool read_numpy_scalar(PyObject* object, Array& out) {
  PyObject* array = Npy::get().PyArray_FromAny_(object, nullptr, 0, 0, 0, nullptr);
  if (!array) throw InvalidArgumentError(take_error());
  fill(py::reinterpret_steal<py::object>(array).ptr(), out);
  // The array is a copy of the scalar: what is written there would be lost.
  out.mutable_view().readonly = true;
  return true;
}

}  // namespace samestep::sources

namespace samestep {

namespace {

// A second tensor on the storage: `x.data = ...` and `x.set_(...)` give the first one another, and would free it.
pybind11::object second_tensor(PyObject* tensor) {
  PyObject* const alias = PyObject_CallMethod(tensor, "detach", nullptr);
  if (alias == nullptr) PyErr_Clear();
  return pybind11::reinterpret_steal<pybind11::object>(alias);
}

}  // namespace

// NumPy does not look at buffers that it has exported, but moves no memory of an array with a weak reference.
pybind11::object pin_memory(const Array& array) {
  namespace py = pybind11;
  const auto& numpy = py::detail::npy_api::get();
  PyObject* owner = array.referenced();
  if (owner == nullptr) return {};
  if (!numpy.PyArray_Check_(owner)) {
    return sources::facts_of(Py_TYPE(owner)).torch ? second_tensor(owner) : py::object();
  }
  // Only the array at the end of the chain owns the memory, and only its `resize` can move it.
  for (PyObject* base = owner; base != nullptr && numpy.PyArray_Check_(base);) {
    owner = base;
    base = py::detail::array_proxy(owner)->base;
  }
  PyObject* const weak = PyWeakref_NewRef(owner, nullptr);
  if (weak == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(weak);
}

}  // namespace samestep
