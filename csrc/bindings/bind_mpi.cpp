#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "mpi/mpi_communicator.h"
#include "mpi/mpi_library.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

void bind_mpi(py::module_& m) {
  py::class_<MpiFacts>(m, "MpiFacts", "What mpi4py knows of the MPI library it has loaded.")
      .def(py::init<>())
      .def_readwrite("module_path", &MpiFacts::module_path)
      .def_readwrite("comm_nbytes", &MpiFacts::comm_nbytes)
      .def_readwrite("status_nbytes", &MpiFacts::status_nbytes)
      .def_readwrite("comm_world", &MpiFacts::comm_world)
      .def_readwrite("request_null", &MpiFacts::request_null)
      .def_readwrite("byte_type", &MpiFacts::byte_type)
      .def_readwrite("errors_return", &MpiFacts::errors_return)
      .def_readwrite("any_source", &MpiFacts::any_source)
      .def_readwrite("tag_limit", &MpiFacts::tag_limit);
  py::class_<MpiLibrary, std::shared_ptr<MpiLibrary>>(m, "MpiLibrary", "The MPI calls of the library mpi4py uses.")
      .def_static("open", &MpiLibrary::open, "facts"_a)
      .def_property_readonly("interface", &MpiLibrary::interface_name)
      .def_property_readonly("path", &MpiLibrary::path);
  m.def(
      "open_mpi_world",
      [](std::shared_ptr<MpiLibrary> library, bool oversubscribed, double timeout) {
        ExchangeOptions options;
        options.oversubscribed = oversubscribed;
        const py::gil_scoped_release no_gil;
        return open_mpi_world(std::move(library), options, Deadline::after(Seconds(timeout)));
      },
      "library"_a, "oversubscribed"_a, "timeout"_a,
      "The world of MPI_COMM_WORLD on communicators of our own. Collective.");
  m.def("mpi_has_lost_ranks", &mpi_has_lost_ranks, "Whether a watched rank has died: MPI_Finalize may wait for it.");
  m.def(
      "watch_ranks",
      [](Communicator& world, int listener,
         const std::vector<std::tuple<std::string, std::uint16_t, std::string>>& places) {
        std::vector<PeerWatch::Place> all;
        for (const auto& [address, port, where] : places) all.push_back({address, port, where});
        watch_ranks(world, std::make_shared<PeerWatch>(Fd(listener), all));
      },
      "world"_a, "listener"_a, "places"_a,
      "Lets a group over MPI know which ranks have died. `listener`: a listening socket, which is owned from now on; "
      "`places`: by rank, the address and port where each listens, and the same for texts.");
}

}  // namespace samestep
