#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arrays/array_view.h"
#include "arrays/device_copies.h"
#include "arrays/free_threading.h"
#include "calls/memory_in_use.h"
#include "core/error.h"
#include "core/format.h"
#include "kernels/stream.h"
#include "kernels/strided.h"

namespace samestep {

namespace py = pybind11;

namespace {

constexpr std::size_t kReleaseGilAbove = 64 * 1024;  // bytes; below, giving the GIL away costs more than the copy

py::tuple to_tuple(std::span<const std::int64_t> values) {
  py::tuple result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) result[i] = values[i];
  return result;
}

PyTypeObject* info_type = nullptr;

/// A tuple of nine whose items have names, and so has a tenth, which is not one of them.
py::object make_info_type() {
  static PyStructSequence_Field fields[] = {{"dtype", nullptr},    {"shape", nullptr},        {"strides", nullptr},
                                            {"nbytes", nullptr},   {"readonly", nullptr},     {"contiguous", nullptr},
                                            {"device", nullptr},   {"device_index", nullptr}, {"address", nullptr},
                                            {"writable", nullptr}, {nullptr, nullptr}};
  static PyStructSequence_Desc description = {"samestep._core.ArrayInfo", "What an array is.", fields, 9};
  info_type = PyStructSequence_NewType(&description);
  if (info_type == nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(info_type));
}

py::object view_info(const py::object& object) {
  const Array array = view_of(object.ptr());
  const ArrayView& view = array.view();
  const std::string_view dtype = samestep::name(view.dtype);
  auto result = py::reinterpret_steal<py::object>(PyStructSequence_New(info_type));
  if (!result) throw py::error_already_set();
  Py_ssize_t at = 0;
  for (py::object item : std::initializer_list<py::object>{
           py::str(dtype.data(), dtype.size()), to_tuple(view.extents()), to_tuple(view.steps()),
           py::int_(view.nbytes()), py::bool_(view.readonly), py::bool_(view.contiguous),
           py::str(device_name(view.device.kind)), py::int_(view.device.index),
           py::int_(reinterpret_cast<std::uintptr_t>(view.data)), py::bool_(!view.readonly)}) {
    PyStructSequence_SetItem(result.ptr(), at++, item.release().ptr());
  }
  return result;
}

py::tuple memory_span(const py::object& object) {
  const Array array = view_of(object.ptr());
  const ArrayView::Extent extent = array->extent();
  return py::make_tuple(reinterpret_cast<std::uintptr_t>(extent.begin), extent.nbytes, overlaps_itself(array.view()));
}

// Decodes Shape::memory_order, whose last digit is the innermost axis.
py::object memory_order(const py::object& object) {
  const std::optional<std::uint64_t> order = view_of(object.ptr())->memory_order();
  if (!order) return py::none();
  std::vector<int> axes;
  for (std::uint64_t left = *order; left > 1; left >>= 4) axes.insert(axes.begin(), static_cast<int>(left & 0xF));
  return py::tuple(py::cast(axes));
}

// Views of all items of the list called `list`, or an error that names the first bad one.
// All arrays are viewed before the first byte is copied: an error leaves them as they were.
std::vector<Array> view_all(const py::handle& arrays, const char* list, bool to_write, bool as_they_lie) {
  auto items = py::reinterpret_steal<py::object>(PySequence_Fast(arrays.ptr(), "arrays must be a sequence"));
  if (!items) throw py::error_already_set();
  // A list is not copied above, and another thread may change it.
  if (kFreeThreaded && PyList_Check(items.ptr())) {
    items = py::reinterpret_steal<py::object>(PyList_AsTuple(items.ptr()));
    if (!items) throw py::error_already_set();
  }
  const auto n = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
  std::vector<Array> views;
  views.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto label = [&](const std::exception& error) { return str(list, "[", i, "]: ", error.what()); };
    try {
      views.push_back(view_of(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i))));
      require_reachable(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)), views.back().mutable_view(),
                        as_they_lie);
      if (to_write) require_writable(views.back().view(), nullptr);
    } catch (const InvalidArgumentError& error) {
      throw InvalidArgumentError(label(error));
    } catch (const py::type_error& error) {
      throw py::type_error(label(error));
    }
  }
  return views;
}

std::vector<ArrayView> as_views(std::span<const Array> arrays) {
  std::vector<ArrayView> views;
  for (const Array& array : arrays) views.push_back(array.view());
  return views;
}

// The packed side: one run of exactly as many bytes as the arrays hold.
Array view_run(const py::object& buffer, const char* what, std::span<const ArrayView> arrays) {
  Array run = view_of(buffer.ptr(), what);
  std::size_t nbytes = 0;
  for (const ArrayView& array : arrays) nbytes += array.nbytes();
  if (!run->contiguous || run->device.kind != DeviceKind::cpu || run->nbytes() != nbytes) {
    throw InvalidArgumentError(str(what, ": needs ", nbytes, " contiguous bytes of the host for ", arrays.size(),
                                   " arrays, got ", run->nbytes(), run->contiguous ? "" : " with gaps",
                                   "; make it with np.empty(", nbytes, ", np.uint8)"));
  }
  return run;
}

// Calls `copy(view, place in the run)` for each array, without the GIL if that may take long.
template <class Copy>
void copy_each(std::span<ArrayView> arrays, const Array& run, bool packs, Copy copy) {
  std::optional<py::gil_scoped_release> no_gil;
  const bool on_device =
      std::ranges::any_of(arrays, [](const ArrayView& array) { return array.device.kind != DeviceKind::cpu; });
  if (on_device || run->nbytes() > kReleaseGilAbove) no_gil.emplace();  // a device may be waited for
  if (on_device) await_streams(arrays);
  // Declared after the release of the GIL: after an exception its destructor waits for the device, still without it.
  DeviceCopies copies;
  char* place = static_cast<char*>(run->data);
  if (on_device && copies.begin_packed(arrays, place, /*to_host=*/packs)) return copies.finish();
  for (const ArrayView& array : arrays) {
    const std::size_t nbytes = array.nbytes();
    if (nbytes > 0) copy(array, place, copies);
    place += nbytes;
  }
  copies.finish();
}

/// What operations in progress write must be there before these arrays are read, or they are written behind it.
void settle(const py::handle& arrays, bool to_write) {
  if (!memory_in_use::any()) return;
  for (const py::handle& array : arrays) {
    Array view;
    if (try_view(array.ptr(), view))
      memory_in_use::settle(array.ptr(), view.view(), to_write, /*is_message=*/false, "");
  }
}

void pack(const py::object& arrays, const py::object& out, bool as_they_lie) {
  const std::vector<Array> views = view_all(arrays, "pack: arrays", /*to_write=*/false, as_they_lie);
  settle(arrays, /*to_write=*/false);
  std::vector<ArrayView> parts = as_views(views);
  const Array run = view_run(out, "pack: out", parts);
  require_writable(run.view(), "pack: out");
  copy_each(parts, run, /*packs=*/true,
            [](const ArrayView& from, char* to, DeviceCopies& copies) { pack_elements(from, to, copies); });
}

bool copy_between_devices(const py::object& from, const py::object& to) {
  Array source = view_of(from.ptr()), target = view_of(to.ptr());
  if (source->device.kind == DeviceKind::cpu || target->device.kind == DeviceKind::cpu) return false;
  if (source->memory_order() != target->memory_order()) return false;
  require_reachable(from.ptr(), source.mutable_view(), /*in_any_order=*/true);
  require_reachable(to.ptr(), target.mutable_view(), /*in_any_order=*/true);
  require_writable(target.view(), "out");
  const py::gil_scoped_release no_gil;  // the runtime is asked, and a stream may be full
  return copy_on_device(source.view(), target.view());
}

void await_arrays(const py::list& arrays, const std::shared_ptr<Communicator>& comm, double timeout) {
  std::vector<Array> views;
  std::vector<ArrayView> on_device;
  for (const py::handle& item : arrays) {
    Array view;
    if (!try_view(item.ptr(), view) || gpu_of(view.view()) == nullptr) continue;
    find_stream(item.ptr(), view.mutable_view());
    on_device.push_back(view.view());
    views.push_back(std::move(view));
  }
  if (on_device.empty()) return;
  const py::gil_scoped_release no_gil;
  const WaitLimit limit{comm, Deadline::after(Seconds(timeout))};
  await_streams(on_device, &limit);
}

void unpack(const py::object& buffer, const py::object& arrays, bool as_they_lie) {
  const std::vector<Array> views = view_all(arrays, "unpack: arrays", /*to_write=*/true, as_they_lie);
  settle(arrays, /*to_write=*/true);
  std::vector<ArrayView> parts = as_views(views);
  const Array run = view_run(buffer, "unpack: buffer", parts);
  copy_each(parts, run, /*packs=*/false, [](const ArrayView& to, const char* from, DeviceCopies& copies) {
    if (to.device.kind != DeviceKind::cpu) {
      copies.begin(to, to.data, from);
    } else if (to.contiguous) {
      kernels::copy(to.data, from, to.nbytes());
    } else {
      kernels::unpack(from, to.data, to.extents(), to.steps(), itemsize(to.dtype));
    }
  });
  for (const py::handle array : arrays) bump_version(array.ptr());
}

bool do_share_memory(const py::object& x, const py::object& out) {
  const Array a = view_of(x.ptr()), b = view_of(out.ptr(), "recv");
  if (a->device.kind != b->device.kind) return false;
  const ArrayView::Extent of_x = a->extent(), of_out = b->extent();
  return share_memory(of_x.begin, of_x.nbytes, of_out.begin, of_out.nbytes);
}

}  // namespace

void bind_arrays(py::module_& m) {
  m.attr("ArrayInfo") = make_info_type();
  m.def("view_info", &view_info, py::arg("x"), "The ArrayInfo of any array.");
  m.def("memory_span", &memory_span, py::arg("x"),
        "(first address, bytes up to the end of the last element, whether two elements share a byte) of any array.");
  m.def("memory_order", &memory_order, py::arg("x"),
        "The axes whose extent is not 1, in the order in which they lie, if the elements fill one run of memory: () if "
        "that is row-major, None if they do not.");
  m.def("share_memory", &do_share_memory, py::arg("x"), py::arg("out"),
        "Whether two arrays may have bytes in common: their first to last ones have.");
  m.def("pack", &pack, py::arg("arrays"), py::arg("out"), py::arg("as_they_lie") = false,
        "Copy the elements of each array, in row-major order, one array after another into `out`: contiguous host "
        "memory of exactly as many bytes, which shares none with the arrays. `as_they_lie`: those of device memory in "
        "the order in which they lie.");
  m.def(
      "unpack", &unpack, py::arg("buffer"), py::arg("arrays"), py::arg("as_they_lie") = false,
      "The reverse of pack: copy the bytes of `buffer` into the arrays, whose libraries learn that they were written. "
      "Nothing is written if any argument is bad.");
  m.def("settle", &settle, py::arg("arrays"), py::arg("to_write") = false,
        "End the operations in progress that write these arrays, and if `to_write` those that read them.");
  m.def("memory_is_in_use", &memory_in_use::any, "Whether any operation in progress uses memory.");
  m.def("await_streams", &await_arrays, py::arg("arrays"), py::arg("comm"), py::arg("timeout"),
        "Waits for the work that is now queued in the streams of a list's device arrays, because copying them cannot "
        "time out. After `timeout` seconds this rank leaves the group and raises TimeoutError.");
  m.def("copy_on_device", &copy_between_devices, py::arg("x"), py::arg("out"),
        "Copy an array to another one of its dtype and shape, in device memory, in the order of their streams. False, "
        "without effect, if they overlap in part, are not on one device or have their axes in different orders.");
}

}  // namespace samestep
