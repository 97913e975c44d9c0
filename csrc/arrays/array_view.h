#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/buffer.h"
#include "core/dtype.h"

namespace samestep {

/// The memory, dtype and layout of an array of any library.
struct ArrayView {
  static constexpr int kMaxDims = 32;
  static constexpr int kMaxOrderedDims = 15;  ///< of `memory_order`: digits after the leading 1

  ArrayView() = default;
  ArrayView(const ArrayView& other) { *this = other; }
  ArrayView& operator=(const ArrayView& other);  // only the dimensions in use

  void* data = nullptr;
  DType dtype = DType::uint8;
  int n_dims = 0;
  std::int64_t count = 0;           ///< elements
  std::int64_t shape[kMaxDims];     ///< the first n_dims are set
  std::int64_t strides[kMaxDims];   ///< bytes, may be negative or zero; the first n_dims are set
  bool contiguous = true;           ///< row-major without gaps, and aligned: kernels may use `data` directly
  bool readonly = false;            ///< the memory must not be written, or the library does not say
  Device device = {};               ///< index -1: the library does not say which
  StreamHandle stream = kNoStream;  ///< device memory: set by `find_stream`

  std::span<const std::int64_t> extents() const { return {shape, static_cast<std::size_t>(n_dims)}; }
  std::span<const std::int64_t> steps() const { return {strides, static_cast<std::size_t>(n_dims)}; }
  std::size_t nbytes() const { return static_cast<std::size_t>(count) * itemsize(dtype); }
  /// From the first byte of any element to the last one of any.
  struct Extent {
    const std::byte* begin;
    std::size_t nbytes;
  };
  Extent extent() const;
  /// The axes in the order in which they lie, as in Shape::memory_order, if the elements fill one run of memory, as
  /// with torch.channels_last; nullopt if they do not. 0: row-major.
  std::optional<std::uint64_t> memory_order() const;
  /// The elements as one buffer, in the order in which they lie. Only for views with a memory order.
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
  /// The array itself where a reference to it keeps the memory alive, else null. Borrowed.
  PyObject* referenced() const noexcept;

 private:
  ArrayView view_;
  void* owner_ = nullptr;
  Release release_ = nullptr;
};

/// The memory of any array, without a copy and without importing the library that made it. Tried in
/// this order: NumPy's C fields, DLPack's C exchange API (torch), the buffer protocol, `__dlpack__`,
/// `__cuda_array_interface__`. A NumPy scalar is a read-only array of no dimensions.
///
/// Waits until a JAX array is ready. Memory counts as read-only where it says so, where it says nothing (a DLPack
/// capsule without flags) of a library that is not known for mutable arrays, and in all arrays of array libraries that
/// are not. Device memory is viewed too, see `device`. Autograd does not notice writes through a view: call
/// `bump_version`.
///
/// Throws, with `what` (if any) and `argument` (": out" for one that is written) in front of the text:
///   InvalidArgumentError   an array whose elements cannot be sent from where they are: a dtype that DType lacks,
///                          foreign byte order, sparse, meta, masked, more than 32 dimensions, or a torch tensor
///                          that is conjugated or negated lazily; or a layout that cannot be: negative extents,
///                          null data, a size or strides beyond the address space
///   pybind11::type_error   not an array: Python numbers, lists, bytes, str, ...
Array view_of(PyObject* object, const char* what = nullptr, const char* argument = "");

/// The same for the fast path, into an empty `array`. False if `view_of` would throw; what is no `Exception` (Ctrl-C)
/// and a MemoryError are thrown, since the library of the array may not raise them again.
bool try_view(PyObject* object, Array& array);

/// The stream in which the library of `object`, memory of `view.device`, works on it now; kNoStream where it is not
/// known or no write is pending. Set in `view` too.
StreamHandle find_stream(PyObject* object, ArrayView& view);

/// `find_stream` for the arrays of one call: torch's tensors do not know a stream, so that it asks once for all of them
/// on a device.
class StreamFinder {
 public:
  StreamHandle find(PyObject* object, ArrayView& view);

 private:
  std::optional<Device> device_;  ///< of the tensors whose stream is known
  StreamHandle of_torch_ = kNoStream;
};

/// While the result lives `ndarray.resize` of the array, or of what it is a view of, raises also with refcheck=False,
/// and a torch tensor that is given other memory does not free this one; only a resized storage moves it.
/// None where the memory cannot be pinned, and where it need not be: a Py_buffer pins what it views.
pybind11::object pin_memory(const Array& array);

/// Records that the memory of a torch tensor was written: a backward pass that needs the old values then fails instead
/// of using the new ones. Does nothing for other arrays.
void bump_version(PyObject* object);

/// Whether two elements share a byte, as after `expand`. It is decided from strides alone; some interleaved layouts
/// (`as_strided`) that happen not to overlap count as overlapping.
bool overlaps_itself(const ArrayView& view);

/// Whether every element may be written: not read-only, and no two elements in the same place.
bool writable(const ArrayView& view);

/// Throws InvalidArgumentError that starts with `what` (if any) and ends with the cure, unless `writable(view)`.
/// `object`: the array, whose class the text then names.
void require_writable(const ArrayView& view, const char* what, PyObject* object = nullptr);

/// The shape as Python prints it: "()", "(3,)", "(3, 4)".
std::string shape_text(const ArrayView& view);
/// The strides in bytes, likewise.
std::string strides_text(const ArrayView& view);

/// The dtype of this name. Throws InvalidArgumentError.
DType dtype_named(const std::string& text);

}  // namespace samestep
