#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays/device_copies.h"
#include "arrays/dlpack_export.h"
#include "calls/pending_work.h"
#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "device/device_communicator.h"
#include "device/overlap.h"
#include "device/refusal.h"
#include "gpu/capture.h"
#include "gpu/gpu_memory.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

DeviceKind kind_of(const std::string& name) {
  if (name != "cuda" && name != "rocm") throw InvalidArgumentError(str("no kind of device: ", name));
  return name == "cuda" ? DeviceKind::cuda : DeviceKind::rocm;
}

/// Device memory of our own, for arrays of libraries that we cannot ask for some.
struct DeviceMemory {
  std::shared_ptr<void> data;
  std::size_t nbytes;
  int device;
};

/// Without the GIL: the runtime may wait for the device.
DeviceMemory allocate(const std::shared_ptr<GpuLibrary>& gpu, std::size_t nbytes, int device) {
  const py::gil_scoped_release no_gil;
  const OnDevice on(*gpu, device);
  return {{gpu->allocate(std::max(nbytes, std::size_t{1})),
           [gpu, device](void* data) {
             // The last reference may be dropped with or without the GIL. To free may wait for the device, and Python's
             // other threads must not wait with it.
             std::optional<py::gil_scoped_release> others_run;
             if (PyGILState_Check() != 0) others_run.emplace();
             gpu->free(data, device);
           }},
          nbytes,
          device};
}

void order_uncaptured(GpuLibrary& gpu, int device, StreamHandle later, StreamHandle earlier) {
  for (const StreamHandle stream : {later, earlier}) {
    refuse_capture("__dlpack__", gpu, {nullptr, 0, DType::uint8, {gpu.kind(), device}, stream});
  }
  order_streams(gpu, device, later, earlier);
}

using Comm = std::shared_ptr<Communicator>;
using DeviceComm = std::shared_ptr<DeviceCommunicator>;

Comm open_devices(Comm host, const std::shared_ptr<GpuLibrary>& gpu, int device,
                  const std::shared_ptr<NcclLibrary>& nccl, std::size_t piece, double timeout, bool gpu_aware) {
  DeviceOptions options{gpu, device, nccl, Seconds(timeout)};
  if (piece != 0) options.staging_bytes = piece;
  options.gpu_aware = gpu_aware;
  const py::gil_scoped_release no_gil;
  return DeviceCommunicator::open(std::move(host), std::move(options), Deadline::after(Seconds(timeout)));
}

std::shared_ptr<PendingWork> allreduce_many(const DeviceComm& comm, const py::list& arrays, const py::list& outs,
                                            int op, double factor) {
  auto work = std::make_shared<PendingWork>();
  std::vector<InOut> buffers;
  for (py::size_t i = 0; i < py::len(arrays); ++i) {
    const py::object array = arrays[i], out = outs[i];
    // Elements are reduced one by one, so dense arrays are taken as they lie, whatever the order of their axes.
    buffers.push_back(work->in_out(array, out, "allreduce", PendingWork::Order::any));
  }
  const Reduction reduction{static_cast<ReduceOp>(op), factor};
  work->start_pinned(comm,
                     comm->start_many({.type = CollectiveType::allreduce, .reduction = reduction}, std::move(buffers)));
  return work;
}

std::shared_ptr<PendingWork> bcast_many(const DeviceComm& comm, const py::list& arrays, int root) {
  auto work = std::make_shared<PendingWork>();
  std::vector<InOut> buffers;
  for (const py::handle array : arrays) {
    const Buffer buffer = work->bcast(array, comm->rank() == root);
    buffers.push_back({buffer, buffer});
  }
  work->start_pinned(comm, comm->start_many({.type = CollectiveType::bcast, .root = root}, std::move(buffers)));
  return work;
}

/// For arrays of a group that has no device of its own, or of no group.
void check_memory(const std::string& verb, const ConstBuffer& buffer) {
  ArrayView view;
  view.device = buffer.device;
  const GpuLibrary* const gpu = gpu_of(view);
  if (gpu == nullptr) return;  // what reads them will refuse them
  (void)require_device(verb, *gpu, buffer);
  refuse_capture(verb, *gpu, buffer);
}

/// `leaves`: tuples (array, kind of device, index of the device, address, text) of what has elements in device memory,
/// as `view_info` has found them, so that no library has to export its array once more.
void check_leaves(const Communicator* comm, const py::list& leaves) {
  using Leaf = std::tuple<py::object, std::string, int, std::uintptr_t, std::string>;
  std::vector<std::string> verbs;
  std::vector<ConstBuffer> buffers;
  StreamFinder finder;
  for (const py::handle& leaf : leaves) {
    auto [array, kind, index, address, verb] = leaf.cast<Leaf>();
    ArrayView view;
    view.data = reinterpret_cast<void*>(address);
    view.count = 1;  // some; how many does not matter here
    view.device = {kind == "other" ? DeviceKind::other : kind_of(kind), index};
    finder.find(array.ptr(), view);
    buffers.push_back(view.buffer());
    verbs.push_back(std::move(verb));
  }
  const py::gil_scoped_release no_gil;  // the runtime is asked
  if (const auto* const group = dynamic_cast<const DeviceCommunicator*>(comm))
    return group->check_arrays(verbs, buffers);
  for (std::size_t i = 0; i < buffers.size(); ++i) check_memory(verbs[i], buffers[i]);
}

/// The arrays of one call; does nothing where all are in host memory.
void check_arrays(const Communicator& comm, const std::string& verb, const py::list& arrays) {
  PendingWork borrowed;  // never started: what it says of arrays that cannot be used is what an operation says
  std::vector<ConstBuffer> buffers;
  bool on_device = false;
  for (const py::handle& array : arrays) {
    const Array view = view_of(array.ptr(), verb.c_str());
    on_device |= view->device.kind != DeviceKind::cpu;
    // Those of the host may have any layout, and would be copied.
    buffers.push_back(view->device.kind == DeviceKind::cpu ? ConstBuffer{nullptr, 0, view->dtype, view->device}
                                                           : borrowed.input(array, verb.c_str()));
  }
  if (!on_device) return;
  const py::gil_scoped_release no_gil;  // the runtime is asked
  const std::vector<std::string> verbs(buffers.size(), verb);
  if (const auto* const group = dynamic_cast<const DeviceCommunicator*>(&comm))
    return group->check_arrays(verbs, buffers);
  for (const ConstBuffer& buffer : buffers) checks::in_host_memory(verb, buffer);
}

/// `as`: the dtype of a reduction on device memory. Empty: the others meet in the group of host memory first.
void tell_refusal(Communicator& comm, const std::string& verb, const std::string& why, const std::string& as) {
  auto* const group = dynamic_cast<DeviceCommunicator*>(&comm);
  if (group == nullptr || as.empty()) {
    Communicator& host = group == nullptr ? comm : *group->host();
    if (host.size() == 1) return;
    refusal::tell(refusal::text(verb, why), [&](auto& works) { works.push_back(host.start(refusal::args())); });
    return;
  }
  group->tell_refusal({.type = CollectiveType::allreduce, .in = {nullptr, 0, dtype_named(as)}}, verb, why);
}

/// Without the GIL: to load a library, or to create a device's context, takes up to seconds.
void bind_libraries(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<GpuLibrary, std::shared_ptr<GpuLibrary>>(m, "GpuLibrary", "The CUDA or HIP runtime.")
      .def_static(
          "open",
          [](const std::string& kind, const std::string& path) {
            std::shared_ptr<GpuLibrary> gpu = GpuLibrary::open(kind_of(kind), path);
            register_gpu(gpu);
            return gpu;
          },
          "kind"_a, "path"_a, NoGil())
      .def_property_readonly("path", &GpuLibrary::path)
      .def_property_readonly("kind",
                             [](const GpuLibrary& self) { return self.kind() == DeviceKind::rocm ? "rocm" : "cuda"; })
      .def("device_count", &GpuLibrary::device_count, NoGil())
      .def("current_device", &GpuLibrary::current_device, NoGil())
      .def(
          "set_device", [](const GpuLibrary& self, int device) { self.set_device(device); }, "device"_a, NoGil())
      .def("bus_id", &GpuLibrary::bus_id, "device"_a, NoGil())
      .def("uuid", &GpuLibrary::uuid, "device"_a, NoGil())
      .def(
          "device_of",
          [](const GpuLibrary& self, std::uintptr_t address) {
            return self.device_of(reinterpret_cast<const void*>(address));
          },
          "address"_a, NoGil())
      .def(
          "make_stream",
          [](const GpuLibrary& self, int device) {
            const OnDevice on(self, device);
            return reinterpret_cast<std::uintptr_t>(self.make_stream());
          },
          "device"_a, NoGil(), "A stream for the life of the process.")
      .def("order_streams", &order_uncaptured, "device"_a, "later"_a, "earlier"_a, NoGil(),
           "Lets later work in `later` come after the work that `earlier` has so far. UnavailableError if one of them "
           "is being captured.")
      .def("allocate", &allocate, "nbytes"_a, "device"_a);
  py::class_<DeviceMemory>(m, "DeviceMemory", "Memory of a device, freed with this object.")
      .def_property_readonly("address",
                             [](const DeviceMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data.get()); })
      .def_readonly("nbytes", &DeviceMemory::nbytes)
      .def_readonly("device", &DeviceMemory::device);
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(m, "NcclLibrary", "NCCL or RCCL.")
      .def_static("open", &NcclLibrary::open, "path"_a, NoGil())
      .def_property_readonly("path", &NcclLibrary::path)
      .def_property_readonly("version", &NcclLibrary::version_text);
}

/// Functions about one array.
void bind_device_arrays(py::module_& m) {
  m.def(
      "stream_of",
      [](const py::object& array) -> std::optional<StreamHandle> {
        Array view = view_of(array.ptr());
        const StreamHandle stream = find_stream(array.ptr(), view.mutable_view());
        return stream == kNoStream ? std::nullopt : std::optional(stream);
      },
      "array"_a, "The stream in which the library of this array, device memory, works on it now; None if unknown.");
  m.def(
      "is_captured",
      [](const py::object& array) {
        Array view = view_of(array.ptr());
        const GpuLibrary* const gpu = gpu_of(view.view());
        const StreamHandle stream = find_stream(array.ptr(), view.mutable_view());
        if (gpu == nullptr || stream == kNoStream) return false;
        const py::gil_scoped_release no_gil;  // the runtime is asked
        return gpu->is_capturing(reinterpret_cast<GpuLibrary::Stream>(stream), view->device.index);
      },
      "array"_a, "Whether the stream of this array, device memory, is captured into a graph.");
  m.def(
      "refuse_capture",
      [](const py::object& array, const std::string& verb) {
        Array view = view_of(array.ptr(), verb.c_str());
        const GpuLibrary* const gpu = gpu_of(view.view());
        find_stream(array.ptr(), view.mutable_view());
        if (gpu == nullptr) return;
        const py::gil_scoped_release no_gil;  // the runtime is asked
        refuse_capture(verb, *gpu, view->buffer());
      },
      "array"_a, "verb"_a, "UnavailableError if the stream of this array, device memory, is captured into a graph.");
  m.def(
      "find_conflict",
      [](const std::vector<std::tuple<std::uintptr_t, std::size_t, bool>>& given) {
        std::vector<MemoryRange> ranges;
        for (const auto& [address, nbytes, written] : given) {
          ranges.push_back({reinterpret_cast<const void*>(address), nbytes, written});
        }
        return find_conflict(ranges);
      },
      "ranges"_a,
      "Two runs of memory, (address, bytes, whether it is written), that overlap where one is written: their indices, "
      "or None.");
  m.def(
      "check_leaves", &check_leaves, "comm"_a.none(true), "leaves"_a,
      "Raises what an operation of the group on each of these leaves of a tree would raise before it begins. `leaves`: "
      "(array, kind of device, its index, address, text at the beginning of errors). Without a group, only whether "
      "they can be read.");
  m.def(
      "check_arrays", &check_arrays, "comm"_a, "verb"_a, "arrays"_a,
      "Raises what an operation of the group on these arrays would raise before it begins, because of where they are.");
  m.def("tell_refusal", &tell_refusal, "comm"_a, "verb"_a, "why"_a, "reduced"_a = "",
        "Lets the others, who have begun or will begin a collective, learn that this rank cannot. `reduced`: the dtype "
        "that a reduction on devices would have; without, the collective begins with an exchange on the host.");
  m.def("itemsize", [](const std::string& dtype) { return itemsize(dtype_named(dtype)); }, "dtype"_a);
  m.def(
      "to_dlpack",
      [](const py::object& owner, std::uintptr_t address, const std::string& dtype, std::vector<std::int64_t> shape,
         const std::string& kind, int device, bool versioned) {
        return to_dlpack(
            {owner, reinterpret_cast<void*>(address), dtype_named(dtype), std::move(shape), kind_of(kind), device},
            versioned);
      },
      "owner"_a, "address"_a, "dtype"_a, "shape"_a, "kind"_a, "device"_a, "versioned"_a,
      "A DLPack capsule of device memory that `owner` keeps alive.");
}

}  // namespace

void bind_devices(py::module_& m) {
  bind_libraries(m);
  bind_device_arrays(m);
  py::class_<DeviceCommunicator, Communicator, DeviceComm>(m, "DeviceCommunicator", "A group whose ranks have a GPU.");
  m.def("open_devices", &open_devices, "host"_a, "gpu"_a, "device"_a, "nccl"_a.none(true), "piece"_a, "timeout"_a,
        "gpu_aware"_a = false, "A group that takes arrays of this device as well. Collective over `host`.");
  m.def("allreduce_many", &allreduce_many, "comm"_a, "arrays"_a, "outs"_a, "op"_a, "factor"_a,
        "One operation on many arrays of one dtype; in place where an item of `outs` is that of `arrays`.");
  m.def("bcast_many", &bcast_many, "comm"_a, "arrays"_a, "root"_a,
        "One operation on many arrays, which are only read on root.");
  // pybind11 tries overloads in the order of their definition, so the derived class comes first.
  m.def("has_nccl", [](const DeviceCommunicator& comm) { return comm.options().nccl != nullptr; }, "comm"_a);
  m.def("has_nccl", [](const Communicator&) { return false; }, "comm"_a);
  m.def(
      "nccl_reduces",
      [](const std::string& dtype, int op) { return reduces_on_device(dtype_named(dtype), static_cast<ReduceOp>(op)); },
      "dtype"_a, "op"_a, "Whether NCCL itself has this reduction.");
}

}  // namespace samestep
