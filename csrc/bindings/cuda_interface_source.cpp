#include <bit>
#include <string_view>

#include "bindings/array_sources.h"
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

DType dtype_of(const std::string& text) {
  constexpr char kForeign = std::endian::native == std::endian::little ? '>' : '<';
  for (const TypeString& known : kTypeStrings) {
    if (!text.empty() && text.front() != kForeign && std::string_view(text).substr(1) == known.text) return known.dtype;
  }
  throw InvalidArgumentError(str("elements of type '", text, "' in __cuda_array_interface__ cannot be sent; ",
                                 kAcceptedTypes, "; convert the array first"));
}

void fill(const py::dict& fields, ArrayView& view) {
  const auto shape = fields["shape"].cast<py::tuple>();
  const auto data = fields["data"].cast<py::tuple>();
  const py::object strides = fields.contains("strides") ? py::object(fields["strides"]) : py::none();
  require_dims(static_cast<std::int64_t>(shape.size()));
  view.data = reinterpret_cast<void*>(data[0].cast<std::uintptr_t>());
  view.readonly = data[1].cast<bool>();
  view.dtype = dtype_of(fields["typestr"].cast<std::string>());
  view.device = {DeviceKind::cuda, -1};
  view.n_dims = static_cast<int>(shape.size());
  std::int64_t compact = static_cast<std::int64_t>(itemsize(view.dtype));
  for (int i = view.n_dims - 1; i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(i);
    view.shape[i] = shape[axis].cast<std::int64_t>();
    view.strides[i] = strides.is_none() ? compact : py::tuple(strides)[axis].cast<std::int64_t>();
    compact *= view.shape[i];
  }
  measure(view);
}

}  // namespace

bool read_cuda_interface(PyObject* object, Array& out) {
  if (PyType_Check(object)) return false;
  const py::object found = py::getattr(object, "__cuda_array_interface__", py::none());
  if (!py::isinstance<py::dict>(found)) return false;
  const auto fields = py::reinterpret_borrow<py::dict>(found);
  if (fields.contains("mask") && !fields["mask"].is_none()) {
    throw InvalidArgumentError("a masked array would be sent without its mask; pass its data and its mask one by one");
  }
  fill(fields, out.mutable_view());
  out.own_reference(object);
  return true;
}

}  // namespace samestep::sources
