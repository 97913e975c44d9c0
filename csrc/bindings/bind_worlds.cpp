#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "collectives/select_algorithm.h"
#include "engine/progress_engine.h"
#include "hierarchy/hierarchical_communicator.h"
#include "mpi/mpi_library.h"
#include "mpi/mpi_transport.h"
#include "os/aes_gcm.h"
#include "os/tcp_socket.h"
#include "tcp/tcp_transport.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

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
  m.def("has_lost_ranks", &ProgressEngine::has_lost_ranks, "Whether a rank has died in this process's life.");
  m.def("has_departed_ranks", &ProgressEngine::has_departed_ranks,
        "Whether a rank has left a group before this one did.");
  m.def(
      "watch_ranks",
      [](ExchangeCommunicator& world, int listener, int reserved,
         const std::vector<std::tuple<std::string, std::uint16_t, std::uint16_t, std::string>>& places) {
        std::vector<PeerWatch::Place> all;
        for (const auto& [address, port, reserved_port, where] : places) {
          all.push_back({address, port, reserved_port, where});
        }
        // The sockets are owned from here on, also where PeerWatch throws because an address is invalid.
        PeerWatch::Times times;
        times.silence = TcpSocket::patience() * 7 / 8;
        watch_ranks(world, std::make_shared<PeerWatch>(Fd(listener), Fd(reserved), all, times));
      },
      "world"_a, "listener"_a, "reserved"_a, "places"_a,
      "Lets a group over MPI detect dead ranks. `listener`, `reserved`: a listening socket and one that is only bound, "
      "both owned from now on; `places`: by rank, address, port of the one, port of the other, and text.");
}

}  // namespace

/// The worlds whose ranks exchange messages; see bind_node.cpp for one host.
void bind_worlds(py::module_& m) {
  bind_mpi(m);
  m.def(
      "set_patience", [](double seconds) { TcpSocket::set_patience(Seconds(seconds)); }, "seconds"_a,
      "How long another host may be silent until its ranks are lost.");
  m.def(
      "open_tcp_world",
      [](const std::string& name, int rank, const std::vector<std::pair<int, std::string>>& peers,
         const std::vector<std::pair<std::string, std::string>>& keys) {
        ExchangeOptions options;
        options.name = name;
        options.oversubscribed = true;  // until it is known
        std::vector<TcpPeer> ends;
        // Owned before anything can throw: an error then closes the sockets, which shows the peers that this rank has
        // left.
        for (const auto& [fd, where] : peers) ends.push_back({Fd(fd), where});
        for (std::size_t i = 0; i < keys.size(); ++i) std::tie(ends.at(i).send_key, ends.at(i).receive_key) = keys[i];
        return open_tcp_world(rank, std::move(ends), options);
      },
      "name"_a, "rank"_a, "peers"_a, "keys"_a = py::list(),
      "The group of all ranks. `peers`: by rank, a connected socket, which is owned from now on, and where it leads; "
      "`keys`: by rank, those of what is sent and received, to encrypt it.");
  m.def("encryption_library", &AesGcm::library, "The file of the library that encrypts connections.");
  m.def(
      "select_algorithm",
      [](int n_ranks, std::size_t nbytes) { return std::string(name(select_algorithm(n_ranks, nbytes))); }, "n_ranks"_a,
      "nbytes"_a, "How an allreduce of so many bytes is made that are too many for the headers.");
  m.def(
      "open_hierarchical_world",
      [](ExchangeCommunicator& flat, const std::vector<int>& hosts, std::shared_ptr<LocalPeers> host, double timeout) {
        const py::gil_scoped_release no_gil;
        return open_hierarchical(flat, hosts, std::move(host), Deadline::after(Seconds(timeout)));
      },
      "flat"_a, "hosts"_a, "host"_a.none(true), "timeout"_a,
      "The ranks of a group at two levels. `hosts`: by rank, the number of its host; `host`: of the ranks of this one, "
      "None where this rank is alone on it. Collective.");
}

}  // namespace samestep
