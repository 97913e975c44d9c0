#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "arrays/array_view.h"
#include "arrays/dlpack.h"

/// The sources that `view_of` tries, one for each array protocol, and what they share. All need the GIL.
namespace samestep::sources {

/// Facts about a Python type. Finding them takes microseconds, so those of the last few types are cached.
struct TypeFacts {
  PyTypeObject* type = nullptr;
  const dlpack::ExchangeApi* exchange = nullptr;  ///< null: the type has none of a major we know
  bool torch = false;                             ///< torch.Tensor or a subclass
  PyCFunction is_conj = nullptr;                  ///< the C functions of torch's methods, called as f(tensor, null);
  PyCFunction is_neg = nullptr;                   ///< null: not torch, or a torch that has Python methods there
  bool names_stream = false;                      ///< of CuPy or of ours: says in which stream it is used
  bool jax = false;                               ///< of a module of JAX
  bool becomes_jax = false;                       ///< of ours, handed on as an array of JAX
  bool masked = false;                            ///< numpy.ma.MaskedArray or a subclass
  bool numpy_scalar = false;                      ///< numpy.generic or a subclass
  bool known_mutable = false;                     ///< of a library whose arrays are written in place
  bool never_written = false;                     ///< of an array library that is not known to be such a one
};
TypeFacts facts_of(PyTypeObject* type);

/// The stream in which the library with DLPack's C exchange API works on a device now. None for torch, and for a
/// library without that API.
std::optional<StreamHandle> current_stream(const TypeFacts& facts, const Device& device);

/// Each fills `out` and returns true, or returns false if `object` does not support its protocol or declines; then the
/// next source is tried. Each throws InvalidArgumentError if the elements cannot be sent from where they are.
bool read_numpy(PyObject* object, Array& out);
bool read_numpy_scalar(PyObject* object, Array& out);
bool read_exchange(PyObject* object, const TypeFacts& facts, Array& out);
bool read_buffer(PyObject* object, Array& out);
bool read_dlpack(PyObject* object, const TypeFacts& facts, Array& out);
bool read_cuda_interface(PyObject* object, Array& out);

/// Sets `count` and `contiguous` of a view whose other fields are set.
/// Throws InvalidArgumentError, naming the property, where an extent is negative, elements lie at null, or size or
/// strides reach beyond the address space; after it, arithmetic on the view's extents and strides cannot overflow.
void measure(ArrayView& view);

/// Throws InvalidArgumentError unless `n_dims` fits an ArrayView.
void require_dims(std::int64_t n_dims);

/// The strides of a row-major array without gaps, from `dtype` and `shape`, which need not be valid yet.
void set_compact_strides(ArrayView& view);

/// DLPack's code of a type.
dlpack::DataType dlpack_type(DType dtype);

/// Why `read_buffer` cannot use the buffer of `object`; empty if it has no buffer protocol.
std::string buffer_refusal(PyObject* object);

/// The type of `object` with its module, as in "torch.Tensor" or "list".
std::string type_text(PyObject* object);

/// The first line of the pending Python exception, which is cleared. One that is no `Exception`
/// (Ctrl-C) or a MemoryError is thrown on instead.
std::string take_error();

/// The dtypes that can be sent, for error texts.
inline constexpr const char* kAcceptedTypes =
    "accepted are bool, (u)int8 to (u)int64, float16, bfloat16, float32, float64, complex64, complex128, "
    "float8_e4m3fn and float8_e5m2";

}  // namespace samestep::sources
