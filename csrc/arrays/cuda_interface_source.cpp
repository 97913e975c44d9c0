#include <algorithm>
#include <bit>
#include <string>
#include <string_view>
#include <vector>

#include "arrays/array_sources.h"
#include "arrays/device_copies.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep::sources {

namespace py = pybind11;

namespace {

struct TypeString {
  std::string_view text;  // after the character for byte order
  DType dtype;
};

constexpr TypeString kTypeStrings[] = {
    {"b1", DType::bool_},     {"i1", DType::int8},        {"i2", DType::int16},   {"i4", DType::int32},
    {"i8", DType::int64},     {"u1", DType::uint8},       {"u2", DType::uint16},  {"u4", DType::uint32},
    {"u8", DType::uint64},    {"f2", DType::float16},     {"f4", DType::float32}, {"f8", DType::float64},
    {"c8", DType::complex64}, {"c16", DType::complex128},
};

constexpr int kNewestVersion = 3;

[[noreturn]] void refuse(const char* field, const py::handle& value, const char* expected) {
  throw InvalidArgumentError(
      str("__cuda_array_interface__: '", field, "' must be ", expected, ", got ", std::string(py::repr(value))));
}

py::object field(const py::dict& fields, const char* name) {
  if (!fields.contains(name)) throw InvalidArgumentError(str("__cuda_array_interface__ has no '", name, "'"));
  return fields[name];
}

// A Python or NumPy integer that fits.
template <class Integer>
Integer integer(const py::handle& value, const char* name, const char* expected) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (number) {
    try {
      return number.cast<Integer>();
    } catch (const py::cast_error&) {  // too large
    }
  }
  PyErr_Clear();
  refuse(name, value, expected);
}

std::vector<std::int64_t> integers(const py::object& values, const char* name) {
  constexpr const char* kExpected = "a tuple of 64-bit integers";
  if (!py::isinstance<py::tuple>(values) && !py::isinstance<py::list>(values)) refuse(name, values, kExpected);
  std::vector<std::int64_t> result;
  for (const py::handle value : values) result.push_back(integer<std::int64_t>(value, name, kExpected));
  return result;
}

DType dtype_of(const py::object& typestr) {
  // '|': of types without a byte order. The strings are those of NumPy's array interface, which has none for bfloat16
  // and float8; such arrays have to come by DLPack.
  constexpr std::string_view kOrders = std::endian::native == std::endian::little ? "<|=" : ">|=";
  Py_ssize_t nbytes = 0;
  const char* const utf8 = PyUnicode_Check(typestr.ptr()) ? PyUnicode_AsUTF8AndSize(typestr.ptr(), &nbytes) : nullptr;
  if (utf8 == nullptr) {  // also for a string that UTF-8 cannot hold
    PyErr_Clear();
    refuse("typestr", typestr, "a string");
  }
  const std::string text(utf8, static_cast<std::size_t>(nbytes));
  for (const TypeString& known : kTypeStrings) {
    const bool is_native = !text.empty() && kOrders.find(text.front()) != std::string_view::npos;
    if (is_native && std::string_view(text).substr(1) == known.text) return known.dtype;
  }
  throw InvalidArgumentError(str("elements of type '", text, "' in __cuda_array_interface__ cannot be sent; ",
                                 kAcceptedTypes, "; convert the array first"));
}

void read_memory(const py::object& data, ArrayView& view) {
  constexpr const char* kExpected = "(address, read_only)";
  if (!py::isinstance<py::tuple>(data) || py::len(data) != 2) refuse("data", data, kExpected);
  const auto pair = py::reinterpret_borrow<py::tuple>(data);
  view.data = reinterpret_cast<void*>(integer<std::uintptr_t>(pair[0], "data", kExpected));
  const int readonly = PyObject_IsTrue(py::object(pair[1]).ptr());
  // An answer that cannot be read counts as read-only, the safe side.
  if (readonly < 0) PyErr_Clear();
  view.readonly = readonly != 0;
}

void check_version(const py::dict& fields) {
  if (!fields.contains("version")) return;  // of the first one
  const auto version = integer<int>(fields["version"], "version", "a small integer");
  if (version < 0 || version > kNewestVersion) {
    throw InvalidArgumentError(str("__cuda_array_interface__ of version ", version, "; versions up to 3 can be read"));
  }
}

// `samestep.arrays.describe` reads it, once the array is used.
void check_stream(const py::dict& fields) {
  if (!fields.contains("stream") || fields["stream"].is_none()) return;
  integer<std::uintptr_t>(fields["stream"], "stream", "None or the handle of a stream");
}

// The interface, which libraries have with ROCm too, names neither the kind of the device nor its index. The runtime
// finds the index from the address.
void find_kind(ArrayView& view) {
  view.device = {DeviceKind::rocm, -1};
  const bool has_rocm = gpu_of(view) != nullptr;
  view.device.kind = DeviceKind::cuda;
  if (has_rocm && gpu_of(view) == nullptr) view.device.kind = DeviceKind::rocm;
}

void fill(const py::dict& fields, ArrayView& view) {
  check_version(fields);
  check_stream(fields);
  const std::vector<std::int64_t> shape = integers(field(fields, "shape"), "shape");
  require_dims(static_cast<std::int64_t>(shape.size()));
  read_memory(field(fields, "data"), view);
  view.dtype = dtype_of(field(fields, "typestr"));
  find_kind(view);
  view.n_dims = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  set_compact_strides(view);
  const py::object given = fields.contains("strides") ? py::object(fields["strides"]) : py::none();
  if (!given.is_none()) {
    const std::vector<std::int64_t> strides = integers(given, "strides");
    if (strides.size() != shape.size()) refuse("strides", given, "as many integers as 'shape' has, or None");
    std::copy(strides.begin(), strides.end(), view.strides);
  }
  measure(view);
}

}  // namespace

bool read_cuda_interface(PyObject* object, Array& out) {
  if (PyType_Check(object)) return false;
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object, "__cuda_array_interface__"));
  // Any other exception is a failure of the property itself, and its text tells the caller more than "not an array".
  if (!found && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    return false;
  }
  if (!found) {
    throw InvalidArgumentError(
        str("asking ", type_text(object), " for __cuda_array_interface__ failed: ", take_error()));
  }
  if (!py::isinstance<py::dict>(found)) {
    throw InvalidArgumentError(str("__cuda_array_interface__ of ", type_text(object), " is no dict"));
  }
  const auto fields = py::reinterpret_borrow<py::dict>(found);
  if (fields.contains("mask") && !fields["mask"].is_none()) {
    throw InvalidArgumentError("a masked array would be sent without its mask; pass its data and its mask one by one");
  }
  fill(fields, out.mutable_view());
  out.own_reference(object);
  return true;
}

}  // namespace samestep::sources
