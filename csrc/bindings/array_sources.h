#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "bindings/array_view.h"
#include "bindings/dlpack.h"

/// The ways to read an array that `view_of` tries, and what they share. The GIL is held.
namespace samestep::sources {

/// What one Python type is to us. Asking costs microseconds, so the answers for the last few types are kept.
struct TypeFacts {
  PyTypeObject* type = nullptr;
  const dlpack::ExchangeApi* exchange = nullptr;  ///< null: the type has none of a major we know
  bool torch = false;                             ///< torch.Tensor or a subclass
  PyCFunction is_conj = nullptr;                  ///< the C functions of torch's methods, called as f(tensor, null);
  PyCFunction is_neg = nullptr;                   ///< null: not torch, or a torch that has Python methods there
  bool masked = false;                            ///< numpy.ma.MaskedArray or a subclass
  bool numpy_scalar = false;                      ///< numpy.generic or a subclass
};
TypeFacts facts_of(PyTypeObject* type);

/// Each fills `out` and returns true, or returns false if `object` does not speak its protocol or
/// declines; the next source may know more. Each throws InvalidArgumentError where it is plain that
/// the elements cannot be sent as they lie.
bool read_numpy(PyObject* object, Array& out);
bool read_numpy_scalar(PyObject* object, Array& out);
bool read_exchange(PyObject* object, const TypeFacts& facts, Array& out);
bool read_buffer(PyObject* object, Array& out);
bool read_dlpack(PyObject* object, const TypeFacts& facts, Array& out);
bool read_cuda_interface(PyObject* object, Array& out);

/// Sets `count` and `contiguous` of a view whose other fields are set.
void measure(ArrayView& view);

/// Throws InvalidArgumentError unless `n_dims` fits an ArrayView.
void require_dims(std::int64_t n_dims);

/// Why `object` exports no buffer that `read_buffer` takes; empty if it has no buffer protocol.
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
