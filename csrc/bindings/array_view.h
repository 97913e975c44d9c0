#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>

#include "core/buffer.h"
#include "core/dtype.h"

namespace samestep {

/// Where the elements of an array lie and what they are, whichever library made it.
struct ArrayView {
  static constexpr int kMaxDims = 32;

  ArrayView() = default;
  ArrayView(const ArrayView& other) { *this = other; }
  ArrayView& operator=(const ArrayView& other);  // only the dimensions in use

  void* data = nullptr;
  DType dtype = DType::uint8;
  int n_dims = 0;
  std::int64_t count = 0;           ///< elements
  std::int64_t shape[kMaxDims];     ///< the first n_dims are set
  std::int64_t strides[kMaxDims];   ///< bytes, may be negative or zero; the first n_dims are set
  bool contiguous = true;           ///< row-major without gaps, and aligned: a kernel may run over `data` as it is
  bool readonly = false;            ///< the library says, or leaves open, that the memory must not be written
  Device device = {};               ///< index -1: the library does not say which
  StreamHandle stream = kNoStream;  ///< device memory: set by `find_stream`

  std::size_t nbytes() const { return static_cast<std::size_t>(count) * itemsize(dtype); }
  /// From the first byte of any element to the last one of any.
  struct Extent {
    const std::byte* begin;
    std::size_t nbytes;
  };
  Extent extent() const;
  /// The elements as one run. Only for contiguous views.
  Buffer buffer() const { return {data, static_cast<std::size_t>(count), dtype, device, stream}; }
};

/// A view and what keeps its memory alive: a reference to the array, a Py_buffer or a DLPack tensor. (A torch
/// tensor can still be given other memory by `set_`, `resize_` or `.data =`; its view is then dangling.)
/// Move-only. Made, moved and destroyed with the GIL held.
class Array {
 public:
  using Release = void (*)(void*);

  Array() = default;
  Array(Array&& other) noexcept
      : view_(other.view_),
        owner_(std::exchange(other.owner_, nullptr)),
        release_(std::exchange(other.release_, nullptr)) {}
  Array& operator=(Array&& other) noexcept {
    view_ = other.view_;
    std::swap(owner_, other.owner_);
    std::swap(release_, other.release_);
    return *this;
  }
  ~Array() {
    if (release_) release_(owner_);
  }

  const ArrayView& view() const { return view_; }
  const ArrayView* operator->() const { return &view_; }

  /// For the sources of views: fill `view`, then name what keeps its memory alive.
  ArrayView& mutable_view() { return view_; }
  void own(void* owner, Release release) noexcept {
    owner_ = owner;
    release_ = release;
  }
  void own_reference(PyObject* object) noexcept;

 private:
  ArrayView view_;
  void* owner_ = nullptr;
  Release release_ = nullptr;
};

/// The memory of any array, without a copy and without importing the library that made it. Tried in
/// this order: NumPy's C fields, DLPack's C exchange API (torch), the buffer protocol, `__dlpack__`,
/// `__cuda_array_interface__`. A NumPy scalar is a read-only array of no dimensions.
///
/// A JAX array is waited for. A DLPack capsule without flags (JAX) is taken for read-only. Memory of a
/// GPU is viewed as well; look at `device`. Autograd does not see a write through a view: tell it with
/// `note_written`.
///
/// Throws, with `what` (if any) in front of the text:
///   InvalidArgumentError   an array whose elements cannot be sent as they lie: a dtype that DType lacks,
///                          foreign byte order, sparse, meta, masked, more than 32 dimensions, or a torch tensor
///                          that is conjugated or negated lazily
///   pybind11::type_error   not an array: Python numbers, lists, bytes, str, ...
Array view_of(PyObject* object, const char* what = nullptr);

/// The same for calls that cannot wait: into `array`, which holds nothing yet. False where `view_of` would throw.
bool try_view(PyObject* object, Array& array);

/// The stream in which the library of `object`, device memory, works on it now; kNoStream where it is not known or
/// nothing is under way. Set in `view` too.
StreamHandle find_stream(PyObject* object, ArrayView& view);

/// Tells the library of `object` that its memory was written: torch then refuses a backward pass that
/// needs the old values instead of using the new ones. Does nothing for other arrays.
void note_written(PyObject* object);

/// Whether every element may be written: not read-only, and no two elements in the same place.
/// The second is decided from strides alone; some interleaved layouts (`as_strided`) that happen not to
/// overlap count as overlapping.
bool writable(const ArrayView& view);

/// Throws InvalidArgumentError that starts with `what` (if any) and ends with the cure, unless `writable(view)`.
void require_writable(const ArrayView& view, const char* what);

/// The shape as Python prints it: "()", "(3,)", "(3, 4)".
std::string shape_text(const ArrayView& view);

}  // namespace samestep
