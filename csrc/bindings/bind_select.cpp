#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "select/choice.h"
#include "select/device_assignment.h"

namespace py = pybind11;

namespace samestep {
namespace {

// None, "missing" or a list of ints, as users write `cuda_devices`.
DeviceRequest request_of(const py::object& request) {
  if (request.is_none()) return {};
  if (py::isinstance<py::str>(request) && request.cast<std::string>() == "missing") {
    return {DeviceRequest::Kind::leave_alone};
  }
  try {
    return {DeviceRequest::Kind::list, request.cast<std::vector<int>>()};
  } catch (const py::cast_error&) {
    throw InvalidArgumentError(str("a device request is None, samestep.missing or a list of ints, not ",
                                   py::repr(request).cast<std::string>()));
  }
}

Facts facts(std::string launcher, int launcher_size, bool mpi_loadable, std::string mpi_detail, bool nccl_loadable,
            std::string nccl_detail, int devices, std::string device_detail, bool every_rank_has_device, bool has_pmi) {
  return {std::move(launcher),
          launcher_size,
          mpi_loadable,
          std::move(mpi_detail),
          nccl_loadable,
          std::move(nccl_detail),
          devices,
          std::move(device_detail),
          every_rank_has_device,
          has_pmi};
}

}  // namespace

void bind_select(py::module_& m);

void bind_select(py::module_& m) {
  using py::literals::operator""_a;

  py::class_<Facts>(m, "Facts", "What is known about this process and machine before a backend is chosen.")
      .def(py::init(&facts), py::kw_only(), "launcher"_a = "", "launcher_size"_a = 1, "mpi_loadable"_a = false,
           "mpi_detail"_a = "", "nccl_loadable"_a = false, "nccl_detail"_a = "", "devices"_a = 0,
           "device_detail"_a = "", "every_rank_has_device"_a = false, "has_pmi"_a = false)
      .def_readwrite("launcher", &Facts::launcher)
      .def_readwrite("launcher_size", &Facts::launcher_size)
      .def_readwrite("mpi_loadable", &Facts::mpi_loadable)
      .def_readwrite("mpi_detail", &Facts::mpi_detail)
      .def_readwrite("nccl_loadable", &Facts::nccl_loadable)
      .def_readwrite("nccl_detail", &Facts::nccl_detail)
      .def_readwrite("devices", &Facts::devices)
      .def_readwrite("device_detail", &Facts::device_detail)
      .def_readwrite("every_rank_has_device", &Facts::every_rank_has_device)
      .def_readwrite("has_pmi", &Facts::has_pmi);

  py::class_<Choice>(m, "Choice", "The backend to use, the backend of host arrays, and why.")
      .def_readonly("backend", &Choice::backend)
      .def_readonly("host", &Choice::host)
      .def_readonly("reason", &Choice::reason);
  m.def("choose", &choose, "facts"_a, "requested"_a = "", "Choose a backend; raises UnavailableError with the cure.");

  py::class_<World>(m, "World", "What the loaded MPI says.")
      .def(py::init([](int size, std::string library) { return World{size, std::move(library)}; }), py::kw_only(),
           "size"_a, "library"_a)
      .def_readonly("size", &World::size)
      .def_readonly("library", &World::library);
  m.def("check_launch", &check_launch, "facts"_a, "world"_a,
        "Raise UnavailableError where the launcher started another number of ranks than the world has.");

  m.def(
      "assign_device",
      [](const std::string& kind_name, const py::object& request, int local_rank, int local_size, int n_visible,
         const std::string& looked_for) {
        return assign_device(kind_name, request_of(request), local_rank, local_size, n_visible, looked_for);
      },
      "kind_name"_a, "request"_a, "local_rank"_a, "local_size"_a, "n_visible"_a, "looked_for"_a = "",
      "The device of this rank among the visible ones, or None.");
}

}  // namespace samestep
