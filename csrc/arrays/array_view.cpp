#include "arrays/array_view.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "arrays/array_sources.h"
#include "arrays/free_threading.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep {

namespace py = pybind11;

namespace {

std::string tuple_text(const std::int64_t* values, int n) {
  std::string text = "(";
  for (int i = 0; i < n; ++i) text += str(i ? ", " : "", values[i]);
  return text + (n == 1 ? ",)" : ")");
}

bool read_any(PyObject* object, Array& out) {
  // NumPy arrays come first, because they are the most common and need no facts about their type.
  if (sources::read_numpy(object, out)) return true;
  const sources::TypeFacts facts = sources::facts_of(Py_TYPE(object));
  if (facts.exchange) return sources::read_exchange(object, facts, out);
  // NumPy scalars have the buffer protocol, too. Made into an array, they get the checks and texts of NumPy's dtypes.
  if (facts.numpy_scalar) return sources::read_numpy_scalar(object, out);
  // Bytes have the buffer protocol as well, but more likely stand for an object than for an array of uint8. The error
  // names both possibilities.
  if (PyBytes_Check(object) || PyUnicode_Check(object)) return false;
  const bool read = sources::read_buffer(object, out) || sources::read_dlpack(object, facts, out) ||
                    sources::read_cuda_interface(object, out);
  // Whatever the protocol says: MLX gives out its memory as writable, although other arrays are views of it or will be
  // computed from it.
  if (read && facts.never_written) out.mutable_view().readonly = true;
  return read;
}

std::string not_an_array_text(PyObject* object, bool is_output) {
  const std::string head =
      str("expected an array (NumPy, torch, JAX, CuPy, or anything with DLPack or the buffer protocol), got ",
          sources::type_text(object));
  if (object == Py_None) return head;
  if (is_output) return head + "; pass an array that receives the result";
  if (PyObject_HasAttrString(object, "wait") != 0) return head + "; pass what its wait() returns";
  if (PyUnicode_Check(object)) return head + "; use an object verb such as bcast_object";
  if (PyBytes_Check(object))
    return head + "; pass np.frombuffer(x, np.uint8), or use an object verb such as bcast_object";
  if (PyNumber_Check(object) != 0) return head + "; pass np.asarray(x), or use an object verb such as bcast_object";
  const char* const numbers =
      PyList_Check(object) || PyTuple_Check(object) ? "np.asarray(x) if it holds numbers, " : "";
  return str(head, "; pass ", numbers,
             "a tree of arrays to allreduce_gradients, allreduce_tree or synchronize, and any object to a verb such as "
             "bcast_object");
}

/// Ctrl-C and lack of memory say nothing about the array. Treated as a refusal, they would be lost: in the text of an
/// InvalidArgumentError, or in a second attempt that succeeds.
bool is_no_refusal(const py::error_already_set& error) {
  return !error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError);
}

// Its address also identifies arrays that own a plain reference; see `referenced`.
void release_reference(void* held) { Py_DECREF(static_cast<PyObject*>(held)); }

std::string prefixed(const char* what, const std::string& text, const char* argument = "") {
  return what ? str(what, argument, ": ", text) : text;
}

}  // namespace

ArrayView::Extent ArrayView::extent() const {
  Extent extent{static_cast<const std::byte*>(data), count == 0 ? 0 : itemsize(dtype)};
  for (int i = 0; i < n_dims && count != 0; ++i) {
    const std::int64_t reach = (shape[i] - 1) * strides[i];
    if (reach < 0) extent.begin += reach;
    extent.nbytes += static_cast<std::size_t>(std::abs(reach));
  }
  return extent;
}

ArrayView& ArrayView::operator=(const ArrayView& other) {
  data = other.data;
  dtype = other.dtype;
  n_dims = other.n_dims;
  count = other.count;
  std::copy_n(other.shape, other.n_dims, shape);
  std::copy_n(other.strides, other.n_dims, strides);
  contiguous = other.contiguous;
  readonly = other.readonly;
  device = other.device;
  stream = other.stream;
  return *this;
}

void Array::own_reference(PyObject* object) noexcept {
  Py_INCREF(object);
  own(object, &release_reference);
}

PyObject* Array::referenced() const noexcept {
  return release_ == &release_reference ? static_cast<PyObject*>(owner_) : nullptr;
}

Array view_of(PyObject* object, const char* what, const char* argument) {
  Array array;
  try {
    if (read_any(object, array)) return array;
    // `read_buffer` declines silently, so that DLPack gets its chance. Only when every source has declined is the
    // reason worth a second export.
    const std::string refusal = sources::buffer_refusal(object);
    if (!refusal.empty()) throw InvalidArgumentError(refusal);
  } catch (const InvalidArgumentError& error) {
    throw InvalidArgumentError(prefixed(what, error.what(), argument));
  }
  throw py::type_error(prefixed(what, not_an_array_text(object, *argument != '\0'), argument));
}

bool try_view(PyObject* object, Array& array) {
  try {
    return read_any(object, array);
  } catch (const py::error_already_set& error) {
    if (is_no_refusal(error)) throw;
    return false;
  } catch (const std::exception&) {
    return false;
  }
}

StreamHandle find_stream(PyObject* object, ArrayView& view) {
  if (const auto known = sources::current_stream(sources::facts_of(Py_TYPE(object)), view.device)) {
    return view.stream = *known;
  }
  constinit static CachedAttribute stream_of("samestep.arrays.libraries", "stream_of");
  constinit static CachedAttribute of_torch("samestep.arrays.of_torch", "torch_streams",
                                            CachedAttribute::Of::its_result);
  const bool torch = view.device.index >= 0 && sources::facts_of(Py_TYPE(object)).torch;
  const auto stream = torch ? py::handle(of_torch.get())(view.device.index)
                            : py::reinterpret_steal<py::object>(PyObject_CallOneArg(stream_of.get(), object));
  if (!stream) throw py::error_already_set();
  view.stream = stream.is_none() ? kNoStream : stream.cast<StreamHandle>();
  return view.stream;
}

StreamHandle StreamFinder::find(PyObject* object, ArrayView& view) {
  const bool torch = view.device.index >= 0 && sources::facts_of(Py_TYPE(object)).torch;
  if (torch && view.device == device_) return view.stream = of_torch_;
  find_stream(object, view);
  if (torch) {
    device_ = view.device;
    of_torch_ = view.stream;
  }
  return view.stream;
}

void bump_version(PyObject* object) {
  if (!sources::facts_of(Py_TYPE(object)).torch) return;
  constinit static CachedAttribute increment_version("torch.autograd.graph", "increment_version");
  PyObject* done = PyObject_CallOneArg(increment_version.get(), object);
  if (!done) throw py::error_already_set();
  Py_DECREF(done);
}

bool overlaps_itself(const ArrayView& view) {
  if (view.contiguous || view.count == 0) return false;
  struct Dim {
    std::int64_t stride, extent;
  };
  std::array<Dim, ArrayView::kMaxDims> dims;
  std::size_t n = 0;
  for (int i = 0; i < view.n_dims; ++i) {
    if (view.shape[i] > 1) dims[n++] = {std::abs(view.strides[i]), view.shape[i]};
  }
  // Taken by stride, each axis must step over everything that the axes before it span; then no two elements share a
  // byte. The converse does not hold: some interleaved layouts count as overlapping, as the header says.
  std::sort(dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(n),
            [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  std::int64_t reach = static_cast<std::int64_t>(itemsize(view.dtype));  // bytes that the dims so far span
  for (std::size_t i = 0; i < n; ++i) {
    if (dims[i].stride < reach) return true;
    reach += dims[i].stride * (dims[i].extent - 1);
  }
  return false;
}

bool writable(const ArrayView& view) { return !view.readonly && !overlaps_itself(view); }

void require_writable(const ArrayView& view, const char* what, PyObject* object) {
  if (view.readonly) {
    const std::string type = object ? str(" (", sources::type_text(object), ")") : "";
    throw InvalidArgumentError(
        prefixed(what, str("the array is read-only", type, "; pass a writable copy such as np.array(x)")));
  }
  if (overlaps_itself(view)) {
    throw InvalidArgumentError(
        prefixed(what, str("elements share memory (shape ", shape_text(view), ", strides ", strides_text(view),
                           " bytes), as after expand or broadcast_to; pass a copy such as x.clone() or np.array(x)")));
  }
}

std::string shape_text(const ArrayView& view) { return tuple_text(view.shape, view.n_dims); }
std::string strides_text(const ArrayView& view) { return tuple_text(view.strides, view.n_dims); }

namespace sources {

std::string type_text(PyObject* object) {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  const std::string module = py::str(type.attr("__module__"));
  const std::string name = py::str(type.attr("__qualname__"));
  return module == "builtins" ? name : str(module, ".", name);
}

std::string take_error() {
  py::error_already_set error;
  if (is_no_refusal(error)) throw error;
  std::string text = py::str(error.value());
  text.resize(std::min(text.find('\n'), text.size()));
  while (text.ends_with('.')) text.pop_back();
  return text;
}

}  // namespace sources

DType dtype_named(const std::string& text) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name(static_cast<DType>(i)) == text) return static_cast<DType>(i);
  }
  throw InvalidArgumentError("no dtype: " + text);
}

}  // namespace samestep
