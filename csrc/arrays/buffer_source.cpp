#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <string_view>

#include "arrays/array_sources.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep::sources {

namespace py = pybind11;

namespace {

constexpr int kRequest = PyBUF_RECORDS_RO;  // strides and format; `readonly` then says what the exporter allows

struct ReleaseBuffer {
  void operator()(Py_buffer* buffer) const {
    PyBuffer_Release(buffer);
    delete buffer;
  }
};
using BufferOwner = std::unique_ptr<Py_buffer, ReleaseBuffer>;

// Null, with the Python error pending, if `object` declines.
BufferOwner export_buffer(PyObject* object) {
  // On the heap, because it must not move: PyBuffer_FillInfo lets `shape` and `strides` point into the Py_buffer
  // itself.
  auto raw = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object, raw.get(), kRequest) != 0) return nullptr;
  return BufferOwner(raw.release());
}

struct Format {
  std::string_view letters;
  std::size_t itemsize;
  DType dtype;
};

// The size decides between letters of C types: ctypes writes "<l" for an eight-byte long.
constexpr Format kFormats[] = {
    {"?", 1, DType::bool_},       {"b", 1, DType::int8},         {"h", 2, DType::int16},
    {"i", 4, DType::int32},       {"l", 4, DType::int32},        {"l", 8, DType::int64},
    {"q", 8, DType::int64},       {"n", 8, DType::int64},        {"B", 1, DType::uint8},
    {"H", 2, DType::uint16},      {"I", 4, DType::uint32},       {"L", 4, DType::uint32},
    {"L", 8, DType::uint64},      {"Q", 8, DType::uint64},       {"N", 8, DType::uint64},
    {"e", 2, DType::float16},     {"f", 4, DType::float32},      {"d", 8, DType::float64},
    {"Zf", 8, DType::complex64},  {"Zd", 16, DType::complex128}, {"F", 8, DType::complex64},
    {"D", 16, DType::complex128},
};

std::string_view format_of(const Py_buffer& buffer) { return buffer.format ? buffer.format : "B"; }

// The whole text must match: "bfloat16", as MLX calls it, begins like a signed byte.
std::optional<DType> dtype_of(const Py_buffer& buffer) {
  constexpr std::string_view kNative = std::endian::native == std::endian::little ? "@=<" : "@=>";
  std::string_view letters = format_of(buffer);
  if (!letters.empty() && kNative.find(letters.front()) != std::string_view::npos) letters.remove_prefix(1);
  for (const Format& format : kFormats) {
    if (letters == format.letters && static_cast<std::size_t>(buffer.itemsize) == format.itemsize) return format.dtype;
  }
  if (letters == "bfloat16" && buffer.itemsize == 2) return DType::bfloat16;
  return std::nullopt;
}

void require_plain(const Py_buffer& buffer) {
  require_dims(buffer.ndim);
  if (buffer.ndim > 0 && buffer.shape == nullptr) {
    throw InvalidArgumentError(str("the buffer has ", buffer.ndim, " dimensions but no shape"));
  }
  for (int i = 0; i < buffer.ndim && buffer.suboffsets != nullptr; ++i) {
    if (buffer.suboffsets[i] < 0) continue;
    throw InvalidArgumentError("the buffer has suboffsets: its elements lie in several pieces; pass a copy");
  }
}

}  // namespace

bool read_buffer(PyObject* object, Array& out) {
  if (!PyObject_CheckBuffer(object)) return false;
  BufferOwner buffer = export_buffer(object);
  if (!buffer) {
    // Not yet an error of the caller: another protocol may work. If none does, `buffer_refusal` asks again for the
    // text.
    take_error();
    return false;
  }
  const std::optional<DType> dtype = dtype_of(*buffer);
  if (!dtype) return false;
  require_plain(*buffer);

  ArrayView& view = out.mutable_view();
  view.data = buffer->buf;
  view.dtype = *dtype;
  view.n_dims = buffer->ndim;
  std::copy_n(buffer->shape, buffer->ndim, view.shape);
  if (buffer->strides != nullptr) {
    std::copy_n(buffer->strides, buffer->ndim, view.strides);
  } else {
    set_compact_strides(view);  // ctypes leaves them out, asked for or not
  }
  view.readonly = buffer->readonly != 0;
  measure(view);
  // The exporter states both. If they differ, one is wrong, and access by the larger one could leave the memory.
  if (buffer->len < 0 || static_cast<std::size_t>(buffer->len) != view.nbytes()) {
    throw InvalidArgumentError(str("the buffer says that it holds ", buffer->len, " bytes, but its shape ",
                                   shape_text(view), " takes ", view.nbytes()));
  }
  out.own(buffer.release(), [](void* held) { ReleaseBuffer{}(static_cast<Py_buffer*>(held)); });
  return true;
}

std::string buffer_refusal(PyObject* object) {
  if (!PyObject_CheckBuffer(object) || PyBytes_Check(object) || PyUnicode_Check(object)) return {};
  const BufferOwner buffer = export_buffer(object);
  const std::string type = type_text(object);
  if (!buffer) return str(type, " does not give its memory: ", take_error());
  return str(type, " holds elements of format '", format_of(*buffer), "' and ", buffer->itemsize,
             " bytes, which cannot be sent; ", kAcceptedTypes, "; convert it with NumPy, or pass ",
             "memoryview(x).cast('B') to move bytes");
}

}  // namespace samestep::sources
