#include <pybind11/pybind11.h>

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
      .def_readwrite("any_source", &MpiFacts::any_source);
  py::class_<MpiLibrary, std::shared_ptr<MpiLibrary>>(m, "MpiLibrary", "The MPI calls of the library mpi4py uses.")
      .def_static("open", &MpiLibrary::open, "facts"_a)
      .def_property_readonly("interface", &MpiLibrary::interface_name)
      .def_property_readonly("path", &MpiLibrary::path);
  m.def(
      "open_mpi_world",
      [](std::shared_ptr<MpiLibrary> library, bool oversubscribed, std::size_t max_message, std::size_t window_piece,
         double timeout) {
        MpiOptions options;
        options.exchange.oversubscribed = oversubscribed;
        options.exchange.window_piece = window_piece;
        options.max_message = max_message;
        const py::gil_scoped_release no_gil;
        return open_mpi_world(std::move(library), options, Deadline::after(Seconds(timeout)));
      },
      "library"_a, "oversubscribed"_a, "max_message"_a, "window_piece"_a, "timeout"_a,
      "The world of MPI_COMM_WORLD on communicators of our own. Collective.");
}

}  // namespace samestep
