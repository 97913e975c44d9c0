#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <numeric>

#include "arrays/numpy_memory.h"
#include "node/node_communicator.h"
#include "os/cross_memory.h"
#include "os/process_watch.h"
#include "shm/process_peers.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

/// Shared memory as an object with Python's buffer protocol.
struct SharedBlock {
  std::shared_ptr<std::byte> data;
  std::size_t nbytes;
};

std::shared_ptr<LocalPeers> open_peers(int rank, const std::vector<int>& links,
                                       const std::vector<std::uint64_t>& probes, const Deadline& deadline) {
  // Owned before anything can throw: an error then closes the sockets, which shows the peers that this rank has left.
  std::vector<Fd> owned;
  for (const int fd : links) owned.emplace_back(fd);
  const py::gil_scoped_release no_gil;
  return open_process_peers(rank, std::move(owned), probes, deadline);
}

std::shared_ptr<Communicator> open_node_world(const std::string& name, int rank, const std::vector<int>& links,
                                              const std::vector<std::uint64_t>& probes, double left, double timeout) {
  const Deadline deadline = Deadline::after(Seconds(left), Seconds(timeout));
  std::shared_ptr<LocalPeers> peers = open_peers(rank, links, probes, deadline);
  const py::gil_scoped_release no_gil;
  ExchangeOptions options;
  options.name = name;
  // Spinning with more ranks than CPUs would keep from the CPU those that are waited for; yielding is merely slower.
  // Python configures this once the ranks have compared their CPUs.
  options.oversubscribed = true;  // until it is known
  std::vector<int> members(links.size());
  std::iota(members.begin(), members.end(), 0);
  return NodeCommunicator::open(std::move(peers), members, options, deadline);
}

std::shared_ptr<Communicator> open_beside(Communicator& communicator, const std::vector<int>& ranks,
                                          const std::string& name, double timeout) {
  auto* const of_node = dynamic_cast<NodeCommunicator*>(&communicator);
  if (of_node == nullptr) throw UnavailableError("the ranks of the group are not those of one host");
  const py::gil_scoped_release no_gil;
  return of_node->open_beside(ranks, name, Deadline::after(Seconds(timeout)));
}

std::shared_ptr<SharedHeap> heap_of(Communicator& communicator) {
  const PeerMemory* const memory = communicator.peer_memory();
  return memory != nullptr ? memory->heap() : nullptr;
}

py::object share_numpy(Communicator& communicator, std::size_t limit, std::size_t keep) {
  const std::shared_ptr<SharedHeap> heap = heap_of(communicator);
  if (heap == nullptr) return py::none();
  // Before NumPy gets the handler: the first allocation must already respect the limit.
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

/// What the kernel, or a filter, forbids that ranks of one host use; what they do instead.
std::vector<std::string> forbidden_calls() {
  std::vector<std::string> found;
  // Only a try tells: a seccomp filter or Yama may forbid what the kernel has.
  const std::byte byte{};
  const std::span<const std::byte> buffer(&byte, 1);
  if (!is_open_to_others(::getpid(), {&buffer, 1})) {
    found.emplace_back("no process_vm_readv: long arrays are copied through shared memory");
  }
  if (!ProcessWatch(::getpid()).has_pidfd()) {
    found.emplace_back("no pidfd_open: whether other ranks live is looked up in /proc");
  }
  return found;
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
        PeerMemory* const memory = communicator.peer_memory();
        std::shared_ptr<std::byte> data = memory != nullptr ? memory->allocate(nbytes) : nullptr;
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
      .def_readonly("present", &Usage::present);
  m.def("shared_usage", &shared_usage, "communicator"_a, "None where there is no heap.");
  m.def("is_shared", &is_shared, "communicator"_a, "address"_a, "nbytes"_a,
        "Whether the others can reach this memory of this process.");
  py::class_<LocalPeers, std::shared_ptr<LocalPeers>>(m, "LocalPeers",
                                                      "A rank's access to the other ranks of its host.");
  m.def(
      "open_local_peers",
      [](int rank, const std::vector<int>& links, const std::vector<std::uint64_t>& probes, double left,
         double timeout) { return open_peers(rank, links, probes, Deadline::after(Seconds(left), Seconds(timeout))); },
      "rank"_a, "links"_a, "probes"_a, "left"_a, "timeout"_a,
      "The ranks of a host. `links`: by rank, a connected socket, which is owned from now on; -1 for this rank. "
      "`probes`: the `probe_address` of each. Collective.");
  m.def("probe_address", &probe_address,
        "Where this process has a word that the other ranks of its host read and write to find out whether they can.");
  m.def("forbidden_calls", &forbidden_calls,
        "What ranks of one host cannot use here, and what they do instead; empty where all is allowed.");
  m.def("open_beside", &open_beside, "comm"_a, "ranks"_a, "name"_a, "timeout"_a, "See NodeCommunicator::open_beside.");
  m.def("open_node_world", &open_node_world, "name"_a, "rank"_a, "links"_a, "probes"_a, "left"_a, "timeout"_a,
        "The group of all ranks, which run on one host. `links`, `probes`: as for `open_local_peers`. Collective.");
}

}  // namespace samestep
