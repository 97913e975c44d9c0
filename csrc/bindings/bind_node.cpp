#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <numeric>

#include "node/node_communicator.h"
#include "node/process_host.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

/// Shared memory as an object with Python's buffer protocol.
struct SharedBlock {
  std::shared_ptr<std::byte> data;
  std::size_t nbytes;
};

using PythonExchange = std::function<std::vector<py::bytes>(py::bytes)>;

std::shared_ptr<Communicator> open_node_world(const std::string& name, int rank, int size,
                                              const PythonExchange& exchange, double timeout) {
  const Exchange call = [&exchange](const std::string& mine) {
    const py::gil_scoped_acquire gil;
    std::vector<std::string> all;
    for (const py::bytes& bytes : exchange(py::bytes(mine))) all.push_back(bytes);
    return all;
  };
  const py::gil_scoped_release no_gil;
  const Deadline deadline = Deadline::after(Seconds(timeout));
  ExchangeOptions options;
  options.name = name;
  options.oversubscribed = true;  // until it is known
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return NodeCommunicator::open(meet_processes(rank, size, call, deadline), members, options, deadline);
}

}  // namespace

void bind_node(py::module_& m) {
  py::class_<SharedBlock>(m, "SharedBlock", py::buffer_protocol(), "Memory that the ranks of a host share.")
      .def_buffer([](SharedBlock& block) {
        return py::buffer_info(block.data.get(), 1, py::format_descriptor<unsigned char>::format(),
                               static_cast<py::ssize_t>(block.nbytes));
      });
  m.def(
      "allocate_shared",
      [](Communicator& communicator, std::size_t nbytes) -> py::object {
        std::shared_ptr<std::byte> data = communicator.allocate_shared(nbytes);
        if (data == nullptr) return py::none();
        return py::cast(SharedBlock{std::move(data), nbytes});
      },
      "communicator"_a, "nbytes"_a,
      "Memory on which operations of this group need no copies; None where there is none.");
  m.def("open_node_world", &open_node_world, "name"_a, "rank"_a, "size"_a, "exchange"_a, "timeout"_a,
        "The group of all ranks, which run on one host. `exchange` gathers bytes from all. Collective.");
}

}  // namespace samestep
