#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <numeric>

#include "bindings/numpy_memory.h"
#include "nccl/device_communicator.h"
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

std::shared_ptr<Host> meet_host(int rank, int size, const PythonExchange& exchange, const Deadline& deadline) {
  const Exchange call = [&exchange](const std::string& mine) {
    const py::gil_scoped_acquire gil;
    std::vector<std::string> all;
    for (const py::bytes& bytes : exchange(py::bytes(mine))) all.push_back(bytes);
    return all;
  };
  const py::gil_scoped_release no_gil;
  return meet_processes(rank, size, call, deadline);
}

std::shared_ptr<Communicator> open_node_world(const std::string& name, int rank, int size,
                                              const PythonExchange& exchange, double timeout) {
  const Deadline deadline = Deadline::after(Seconds(timeout));
  std::shared_ptr<Host> host = meet_host(rank, size, exchange, deadline);
  const py::gil_scoped_release no_gil;
  ExchangeOptions options;
  options.name = name;
  options.oversubscribed = true;  // until it is known
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return NodeCommunicator::open(std::move(host), members, options, deadline);
}

std::shared_ptr<SharedHeap> heap_of(Communicator& communicator) {
  if (const auto* const device = dynamic_cast<const DeviceCommunicator*>(&communicator))
    return heap_of(*device->host());
  const auto* const exchange = dynamic_cast<const ExchangeCommunicator*>(&communicator);
  return exchange != nullptr ? exchange->heap() : nullptr;
}

py::object share_numpy(Communicator& communicator, std::size_t limit, std::size_t keep) {
  const std::shared_ptr<SharedHeap> heap = heap_of(communicator);
  if (heap == nullptr) return py::none();
  heap->set_bounds(limit, keep);
  return py::cast(NumpyMemory(heap));
}

py::object shared_usage(Communicator& communicator) {
  const std::shared_ptr<SharedHeap> heap = heap_of(communicator);
  return heap != nullptr ? py::cast(heap->usage()) : py::none();
}

bool is_shared(Communicator& communicator, std::uintptr_t address, std::size_t nbytes) {
  const std::shared_ptr<SharedHeap> heap = heap_of(communicator);
  return heap != nullptr && heap->find(reinterpret_cast<const void*>(address), nbytes).has_value();
}

bool show_shared(Communicator& communicator, const SharedBlock& block, std::uintptr_t address) {
  const std::shared_ptr<SharedHeap> heap = heap_of(communicator);
  const std::size_t whole_pages = (block.nbytes + BlockPool::kPage - 1) / BlockPool::kPage * BlockPool::kPage;
  return heap != nullptr && heap->show_at(block.data.get(), whole_pages, reinterpret_cast<void*>(address));
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
  py::class_<NumpyMemory>(m, "NumpyMemory", "What gives NumPy its memory while shared_arrays is on.")
      .def("remove", &NumpyMemory::remove, "NumPy's memory is as before. Arrays that live keep theirs.");
  m.def("share_numpy", &share_numpy, "communicator"_a, "limit"_a, "keep"_a,
        "NumPy takes its memory from the group's heap, of at most `limit` bytes, of which at most `keep` bytes wait "
        "unused; None where there is no heap. For the current context.");
  using Usage = SharedHeap::Usage;
  py::class_<Usage>(m, "SharedUsage", "Memory that a rank shares with others, in bytes.")
      .def_property_readonly("blocks", [](const Usage& u) { return u.blocks.blocks; })
      .def_property_readonly("used", [](const Usage& u) { return u.blocks.used; })
      .def_property_readonly("held", [](const Usage& u) { return u.blocks.held; })
      .def_readonly("present", &Usage::present)
      .def_readonly("segments", &Usage::segments);
  m.def("shared_usage", &shared_usage, "communicator"_a, "None where there is no heap.");
  m.def("is_shared", &is_shared, "communicator"_a, "address"_a, "nbytes"_a,
        "Whether the others can reach this memory of this process.");
  py::class_<Host, std::shared_ptr<Host>>(m, "Host", "What the ranks of a host can do with each other.");
  m.def(
      "meet_host",
      [](int rank, int size, const PythonExchange& exchange, double timeout) {
        return meet_host(rank, size, exchange, Deadline::after(Seconds(timeout)));
      },
      "rank"_a, "size"_a, "exchange"_a, "timeout"_a,
      "The ranks of a host find each other. `exchange` gathers bytes from all of them. Collective.");
  m.def(
      "show_shared", &show_shared, "communicator"_a, "block"_a, "address"_a,
      "Map the pages of a block in place of those at `address`, which the caller owns; whether that was possible. The "
      "block must live as long as they are used.");
  m.def("open_node_world", &open_node_world, "name"_a, "rank"_a, "size"_a, "exchange"_a, "timeout"_a,
        "The group of all ranks, which run on one host. `exchange` gathers bytes from all. Collective.");
}

}  // namespace samestep
