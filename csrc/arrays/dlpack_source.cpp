#include <algorithm>
#include <cstdint>
#include <string>

#include "arrays/array_sources.h"
#include "arrays/dlpack.h"
#include "arrays/free_threading.h"
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

// Pinned memory is ordinary host memory to everyone but the GPU runtime.
bool is_on_host(dlpack::DeviceType type) {
  return type == dlpack::DeviceType::cpu || type == dlpack::DeviceType::cuda_host ||
         type == dlpack::DeviceType::rocm_host;
}

Device device_of(const dlpack::Device& device) {
  if (is_on_host(device.type)) return {};
  if (device.index < 0) throw InvalidArgumentError(str("the array lies on a device with index ", device.index));
  switch (device.type) {
    case dlpack::DeviceType::cuda:
    case dlpack::DeviceType::cuda_managed:
      return {DeviceKind::cuda, device.index};
    case dlpack::DeviceType::rocm:
      return {DeviceKind::rocm, device.index};
    default:
      return {DeviceKind::other, device.index};
  }
}

std::int64_t stride_in_bytes(const dlpack::Tensor& tensor, int axis, std::int64_t itemsize) {
  std::int64_t nbytes = 0;
  // The stride of an axis of extent 0 or 1 is never used, so it may be any number.
  if (__builtin_mul_overflow(tensor.strides[axis], itemsize, &nbytes) && tensor.shape[axis] > 1) {
    throw InvalidArgumentError(
        str("the stride ", tensor.strides[axis], " of axis ", axis, " reaches beyond the address space"));
  }
  return nbytes;
}

void* first_element(const dlpack::Tensor& tensor) {
  constexpr std::uint64_t kAddressSpace = std::uint64_t{1} << 56;  // of a process, at most
  std::uintptr_t address = 0;
  if (tensor.byte_offset >= kAddressSpace ||
      __builtin_add_overflow(reinterpret_cast<std::uintptr_t>(tensor.data), tensor.byte_offset, &address)) {
    throw InvalidArgumentError(str("the byte_offset ", tensor.byte_offset, " reaches beyond the address space"));
  }
  return tensor.data == nullptr ? nullptr : reinterpret_cast<void*>(address);
}

void fill(const dlpack::Tensor& tensor, PyObject* object, ArrayView& view) {
  require_dims(tensor.n_dims);
  if (tensor.n_dims > 0 && tensor.shape == nullptr) {
    throw InvalidArgumentError(str("the array has ", tensor.n_dims, " dimensions but no shape"));
  }
  view.data = first_element(tensor);
  view.dtype = dtype_of(tensor.dtype, object);
  view.device = device_of(tensor.device);
  view.n_dims = tensor.n_dims;
  std::copy_n(tensor.shape, tensor.n_dims, view.shape);
  const auto bytes = static_cast<std::int64_t>(itemsize(view.dtype));
  // Before version 1.2 DLPack allows null for a compact row-major tensor.
  if (tensor.strides == nullptr) set_compact_strides(view);
  for (int i = 0; i < tensor.n_dims && tensor.strides != nullptr; ++i) {
    view.strides[i] = stride_in_bytes(tensor, i, bytes);
  }
  measure(view);
}

template <class Managed>
void own(Managed* managed, Array& out) {
  out.own(managed, [](void* held) {
    auto* tensor = static_cast<Managed*>(held);
    if (tensor->deleter) tensor->deleter(tensor);
  });
}

void adopt(dlpack::ManagedTensorVersioned* managed, PyObject* object, Array& out) {
  // Owned before anything can throw: nobody else frees the tensor any more.
  own(managed, out);
  if (managed->version.major != 1) {
    throw InvalidArgumentError(str("the array comes as DLPack ", managed->version.major, ".", managed->version.minor,
                                   ", which is newer than 1.x; pass np.asarray(x)"));
  }
  fill(managed->tensor, object, out.mutable_view());
  out.mutable_view().readonly = (managed->flags & dlpack::kReadOnlyFlag) != 0;
}

// Without flags the memory does not say that it may be written.
void adopt(dlpack::ManagedTensor* managed, PyObject* object, bool known_mutable, Array& out) {
  own(managed, out);
  fill(managed->tensor, object, out.mutable_view());
  out.mutable_view().readonly = !known_mutable;
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

bool is_jax_tracer(PyObject* object) {
  const std::string type = type_text(object);
  return type.starts_with("jax") && type.ends_with("Tracer");
}

[[noreturn]] void refuse_export(PyObject* object, const TypeFacts& facts, const std::string& reason) {
  if (is_jax_tracer(object)) {
    throw InvalidArgumentError(
        "JAX is tracing the caller, so the array has no values yet; inside jit call allreduce, reduce, "
        "reduce_scatter, bcast, allgather, alltoall, allreduce_tree, allreduce_gradients or synchronize, which become "
        "part of the compiled program, and all else outside of jit, grad and vmap");
  }
  if (attribute_text(object, "is_fully_replicated") == "False") {
    throw InvalidArgumentError(str("a JAX array is sharded over ", attribute_text(object, "sharding"),
                                   "; pass one that lies on one device, or is the same on all of them, e.g. "
                                   "jax.device_put(x, jax.local_devices()[0])"));
  }
  if (!facts.torch) {
    throw InvalidArgumentError(
        str(type_text(object), " cannot be read as plain memory: ", reason, "; pass e.g. np.asarray(x)"));
  }
  throw InvalidArgumentError(str("a tensor of ", attribute_text(object, "dtype"), ", ",
                                 attribute_text(object, "layout"), ", device ", attribute_text(object, "device"),
                                 " cannot be read as plain memory (", reason, "); ", torch_cure(object)));
}

// The capsule's tensor, which the caller then owns; null if the capsule is of another kind.
template <class Managed>
Managed* take(PyObject* capsule, const char* name, const char* used_name) {
  if (!PyCapsule_IsValid(capsule, name)) return nullptr;
  // The new name is DLPack's sign that a consumer has taken the tensor. Without it the destructor of the capsule would
  // free what the caller now owns.
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  PyCapsule_SetName(capsule, used_name);
  return managed;
}

// The stream that is to wait for an array in device memory, as `__dlpack__` takes it; None where the producer is not
// asked. JAX waits on the host without one. Others would let the legacy default stream wait for the array, which is not
// needed where the array's own stream is known: -1 stands for no synchronization.
py::object stream_to_wait(const py::object& source, const TypeFacts& facts) {
  if (facts.names_stream) return py::int_(-1);
  if (!facts.jax || is_jax_tracer(source.ptr())) return py::none();
  constinit static CachedAttribute jax_stream("samestep.arrays.of_jax", "jax_stream");
  return py::handle(jax_stream.get())(source);
}

// `object.__dlpack__(max_version=(1, 3))`, or without the argument for producers that do not know it.
py::object call_dlpack(const py::object& source, const TypeFacts& facts) {
  const py::object method = source.attr("__dlpack__");
  py::dict arguments;
  if (const py::object stream = stream_to_wait(source, facts); !stream.is_none()) arguments["stream"] = stream;
  try {
    return method(py::arg("max_version") = py::make_tuple(1, 3), **arguments);
  } catch (py::error_already_set& error) {
    // Producers from before DLPack 1.0 do not know the keyword. If the TypeError has another cause, the second call
    // raises it again. A class of their own, as of Arrow, is a refusal.
    if (!error.type().is(py::handle(PyExc_TypeError))) throw;
  }
  return method(**arguments);
}

// JAX does not export an array on several devices, even where each of them holds all of it; null if this is none.
py::object replica_of(PyObject* object) {
  if (is_jax_tracer(object) || !PyObject_HasAttrString(object, "is_fully_replicated")) return {};
  const py::object array = py::reinterpret_borrow<py::object>(object);
  const bool replicated = array.attr("is_fully_replicated").cast<bool>();
  if (!replicated || py::len(array.attr("sharding").attr("device_set")) == 1) return {};
  return array.attr("addressable_data")(0);
}

// TensorFlow ends the process when it is asked for the memory of such a tensor.
void refuse_tensors_of_objects(PyObject* object, const TypeFacts& facts) {
  if (facts.torch || facts.jax) return;
  const std::string dtype = attribute_text(object, "dtype");
  for (const char* name : {"'string'", "'resource'", "'variant'"}) {
    if (dtype.find(name) == std::string::npos) continue;
    throw InvalidArgumentError(
        str("dtype ", dtype, " cannot be sent; ", kAcceptedTypes, "; use an object verb such as bcast_object"));
  }
}

py::object export_capsule(PyObject* object, const TypeFacts& facts) {
  refuse_tensors_of_objects(object, facts);
  py::object source = py::reinterpret_borrow<py::object>(object);
  try {
    if (facts.torch) source = source.attr("detach")();  // torch exports nothing that requires a gradient
    return call_dlpack(source, facts);
  } catch (py::error_already_set& error) {
    error.restore();
  }
  const std::string reason = take_error();
  // Only after the export has failed, so that an array on one device, the common case, is not asked for its sharding.
  if (const py::object replica = replica_of(object)) return export_capsule(replica.ptr(), facts);
  refuse_export(object, facts, reason);
}

}  // namespace

dlpack::DataType dlpack_type(DType dtype) {
  const Type& known = *std::ranges::find(kTypes, dtype, &Type::dtype);
  return {known.code, static_cast<std::uint8_t>(known.bits), 1};
}

std::optional<StreamHandle> current_stream(const TypeFacts& facts, const Device& device) {
  if (facts.exchange == nullptr || facts.torch || facts.exchange->current_stream == nullptr) return {};
  const auto type = device.kind == DeviceKind::rocm ? dlpack::DeviceType::rocm : dlpack::DeviceType::cuda;
  void* stream = nullptr;
  if (facts.exchange->current_stream(type, device.index, &stream) != 0) throw py::error_already_set();
  return reinterpret_cast<StreamHandle>(stream);
}

bool read_exchange(PyObject* object, const TypeFacts& facts, Array& out) {
  // Borrowing allocates nothing, but a borrowed tensor has no flags, and of torch alone it is known that its memory is
  // always writable; see `adopt`.
  if (facts.torch && facts.exchange->borrow) {
    dlpack::Tensor tensor;
    if (facts.exchange->borrow(object, &tensor) != 0) refuse_export(object, facts, take_error());
    fill(tensor, object, out.mutable_view());
    out.own_reference(object);
  } else {
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (facts.exchange->export_managed(object, &managed) != 0) refuse_export(object, facts, take_error());
    if (managed == nullptr) {
      throw InvalidArgumentError(str("DLPack's C exchange API of ", type_text(object), " gave no tensor"));
    }
    adopt(managed, object, out);
    if (facts.never_written) out.mutable_view().readonly = true;
  }
  if (facts.torch) refuse_lazy_bits(object, facts, out->dtype);
  return true;
}

bool read_dlpack(PyObject* object, const TypeFacts& facts, Array& out) {
  // The class of an array has the attribute as well: the function that its instances call.
  if (PyType_Check(object) || !PyObject_HasAttrString(object, "__dlpack__")) return false;
  const py::object capsule = export_capsule(object, facts);
  if (auto* versioned =
          take<dlpack::ManagedTensorVersioned>(capsule.ptr(), "dltensor_versioned", "used_dltensor_versioned")) {
    adopt(versioned, object, out);
  } else if (auto* plain = take<dlpack::ManagedTensor>(capsule.ptr(), "dltensor", "used_dltensor")) {
    adopt(plain, object, facts.known_mutable, out);
  } else {
    throw InvalidArgumentError(str(type_text(object), ".__dlpack__() did not return an unused DLPack capsule"));
  }
  if (facts.torch) refuse_lazy_bits(object, facts, out->dtype);
  return true;
}

}  // namespace samestep::sources
