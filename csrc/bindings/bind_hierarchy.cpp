#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "hierarchy/hierarchical_communicator.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

void bind_hierarchy(py::module_& m) {
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
