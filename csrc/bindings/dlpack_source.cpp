#include <string>

#include "bindings/array_sources.h"
#include "bindings/dlpack.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep::sources {

namespace py = pybind11;

namespace {

struct Type {
  dlpack::TypeCode code;
  int bits;
  DType dtype;
};

constexpr Type kTypes[] = {
    {dlpack::TypeCode::floating, 32, DType::float32},
    {dlpack::TypeCode::floating, 64, DType::float64},
    {dlpack::TypeCode::floating, 16, DType::float16},
    {dlpack::TypeCode::bfloat, 16, DType::bfloat16},
    {dlpack::TypeCode::integer, 64, DType::int64},
    {dlpack::TypeCode::integer, 32, DType::int32},
    {dlpack::TypeCode::integer, 16, DType::int16},
    {dlpack::TypeCode::integer, 8, DType::int8},
    {dlpack::TypeCode::unsigned_integer, 8, DType::uint8},
    {dlpack::TypeCode::unsigned_integer, 16, DType::uint16},
    {dlpack::TypeCode::unsigned_integer, 32, DType::uint32},
    {dlpack::TypeCode::unsigned_integer, 64, DType::uint64},
    {dlpack::TypeCode::boolean, 8, DType::bool_},
    {dlpack::TypeCode::complex, 64, DType::complex64},
    {dlpack::TypeCode::complex, 128, DType::complex128},
    {dlpack::TypeCode::float8_e4m3fn, 8, DType::float8_e4m3fn},
    {dlpack::TypeCode::float8_e5m2, 8, DType::float8_e5m2},
};

std::string attribute_text(PyObject* object, const char* name) {
  return py::str(py::getattr(object, name, py::str("unknown")));
}

DType dtype_of(const dlpack::DataType& type, PyObject* object) {
  for (const Type& known : kTypes) {
    if (type.code == known.code && type.bits == known.bits && type.lanes == 1) return known.dtype;
  }
  throw InvalidArgumentError(str("dtype ", attribute_text(object, "dtype"), " (DLPack code ",
                                 static_cast<int>(type.code), ", ", int{type.bits}, " bits, ", type.lanes,
                                 " lanes) cannot be sent; ", kAcceptedTypes, "; convert the array first"));
}

Device device_of(const dlpack::Device& device) {
  switch (device.type) {
    case dlpack::DeviceType::cpu:
    case dlpack::DeviceType::cuda_host:
    case dlpack::DeviceType::rocm_host:
      return {};
    case dlpack::DeviceType::cuda:
    case dlpack::DeviceType::cuda_managed:
      return {DeviceKind::cuda, device.index};
    case dlpack::DeviceType::rocm:
      return {DeviceKind::rocm, device.index};
  }
  return {DeviceKind::other, device.index};
}

void fill(const dlpack::Tensor& tensor, PyObject* object, ArrayView& view) {
  require_dims(tensor.n_dims);
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.dtype = dtype_of(tensor.dtype, object);
  view.device = device_of(tensor.device);
  view.n_dims = tensor.n_dims;
  const auto bytes = static_cast<std::int64_t>(itemsize(view.dtype));
  std::int64_t compact = bytes;
  for (int i = tensor.n_dims - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides ? tensor.strides[i] * bytes : compact;
    compact *= tensor.shape[i];
  }
  measure(view);
  if (view.count > 0 && !tensor.data) {
    throw InvalidArgumentError(
        "the array has a shape but no memory (a fake, traced or wrapped tensor?); pass a real one");
  }
}

template <class Managed>
void own(Managed* managed, Array& out) {
  out.own(managed, [](void* held) {
    auto* tensor = static_cast<Managed*>(held);
    if (tensor->deleter) tensor->deleter(tensor);
  });
}

void adopt(dlpack::ManagedTensorVersioned* managed, PyObject* object, Array& out) {
  own(managed, out);
  if (managed->version.major != 1) {
    throw InvalidArgumentError(str("the array comes as DLPack ", managed->version.major, ".", managed->version.minor,
                                   ", which is newer than 1.x; pass np.asarray(x)"));
  }
  fill(managed->tensor, object, out.mutable_view());
  out.mutable_view().readonly = (managed->flags & dlpack::kReadOnlyFlag) != 0;
}

// Without flags only torch is known to hand out nothing but writable memory.
void adopt(dlpack::ManagedTensor* managed, PyObject* object, bool torch, Array& out) {
  own(managed, out);
  fill(managed->tensor, object, out.mutable_view());
  out.mutable_view().readonly = !torch;
}

bool answers_true(PyObject* object, PyCFunction method, const char* name) {
  PyObject* answer = method ? method(object, nullptr) : PyObject_CallMethod(object, name, nullptr);
  if (!answer) {
    throw InvalidArgumentError(str("asking ", type_text(object), " for ", name, "() failed: ", take_error()));
  }
  Py_DECREF(answer);
  return answer == Py_True;
}

// torch notes a conjugation or a change of sign in a bit and leaves the memory; DLPack does not carry the bit.
void refuse_lazy_bits(PyObject* object, const TypeFacts& facts, DType dtype) {
  if (is_complex(dtype) && answers_true(object, facts.is_conj, "is_conj")) {
    throw InvalidArgumentError(
        "the tensor is conjugated lazily, so its memory holds other values; pass x.resolve_conj()");
  }
  if (answers_true(object, facts.is_neg, "is_neg")) {
    throw InvalidArgumentError("the tensor is negated lazily, so its memory holds other values; pass x.resolve_neg()");
  }
}

std::string torch_cure(PyObject* tensor) {
  if (attribute_text(tensor, "device") == "meta") return "give it memory first, e.g. with to_empty(device='cpu')";
  if (attribute_text(tensor, "is_quantized") == "True") return "pass x.dequantize()";
  if (attribute_text(tensor, "layout") != "torch.strided") return "pass x.to_dense()";
  return "pass an ordinary tensor";
}

[[noreturn]] void refuse_export(PyObject* object, const TypeFacts& facts) {
  const std::string reason = take_error();
  if (!facts.torch) {
    throw InvalidArgumentError(str(type_text(object), " cannot be read as plain memory: ", reason,
                                   "; pass an array of an accepted dtype that lies on one device, outside of jit"));
  }
  throw InvalidArgumentError(str("a tensor of ", attribute_text(object, "dtype"), ", ",
                                 attribute_text(object, "layout"), ", device ", attribute_text(object, "device"),
                                 " cannot be read as plain memory (", reason, "); ", torch_cure(object)));
}

// The capsule's tensor, which the caller then owns; null if the capsule is of another kind.
template <class Managed>
Managed* take(PyObject* capsule, const char* name, const char* used_name) {
  if (!PyCapsule_IsValid(capsule, name)) return nullptr;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  PyCapsule_SetName(capsule, used_name);
  return managed;
}

// `object.__dlpack__(max_version=(1, 3))`, or without the argument for producers that do not know it.
py::object call_dlpack(const py::object& method) {
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 3));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method();
}

py::object export_capsule(PyObject* object, const TypeFacts& facts) {
  py::object source = py::reinterpret_borrow<py::object>(object);
  try {
    if (facts.torch) source = source.attr("detach")();  // torch exports nothing that requires a gradient
    return call_dlpack(source.attr("__dlpack__"));
  } catch (py::error_already_set& error) {
    error.restore();
  }
  refuse_export(object, facts);
}

}  // namespace

bool read_exchange(PyObject* object, const TypeFacts& facts, Array& out) {
  if (facts.torch && facts.exchange->borrow) {
    dlpack::Tensor tensor;
    if (facts.exchange->borrow(object, &tensor) != 0) refuse_export(object, facts);
    fill(tensor, object, out.mutable_view());
    out.own_reference(object);
  } else {
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (facts.exchange->export_managed(object, &managed) != 0) refuse_export(object, facts);
    adopt(managed, object, out);
  }
  if (facts.torch) refuse_lazy_bits(object, facts, out->dtype);
  return true;
}

bool read_dlpack(PyObject* object, const TypeFacts& facts, Array& out) {
  if (PyType_Check(object) || !PyObject_HasAttrString(object, "__dlpack__")) return false;
  const py::object capsule = export_capsule(object, facts);
  if (auto* versioned =
          take<dlpack::ManagedTensorVersioned>(capsule.ptr(), "dltensor_versioned", "used_dltensor_versioned")) {
    adopt(versioned, object, out);
  } else if (auto* plain = take<dlpack::ManagedTensor>(capsule.ptr(), "dltensor", "used_dltensor")) {
    adopt(plain, object, facts.torch, out);
  } else {
    throw InvalidArgumentError(str(type_text(object), ".__dlpack__() did not return an unused DLPack capsule"));
  }
  if (facts.torch) refuse_lazy_bits(object, facts, out->dtype);
  return true;
}

}  // namespace samestep::sources
