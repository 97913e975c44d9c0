#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "collectives/select_algorithm.h"
#include "tcp/tcp_transport.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

void bind_tcp(py::module_& m) {
  m.def(
      "open_tcp_world",
      [](const std::string& name, int rank, const std::vector<std::pair<int, std::string>>& peers) {
        ExchangeOptions options;
        options.name = name;
        options.oversubscribed = true;  // until it is known
        std::vector<TcpPeer> ends;
        // Owned before anything can throw: an error then closes the sockets, which shows the peers that this rank has
        // left.
        for (const auto& [fd, where] : peers) ends.push_back({Fd(fd), where});
        return open_tcp_world(rank, std::move(ends), options);
      },
      "name"_a, "rank"_a, "peers"_a,
      "The group of all ranks. `peers`: by rank, a connected socket, which is owned from now on, and where it leads.");
  m.def(
      "select_algorithm",
      [](int n_ranks, std::size_t nbytes) { return std::string(name(select_algorithm(n_ranks, nbytes))); }, "n_ranks"_a,
      "nbytes"_a, "How an allreduce of so many bytes is made that are too many for the headers.");
}

}  // namespace samestep
