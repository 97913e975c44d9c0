#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/pending_work.h"
#include "core/error.h"
#include "device/device_cliques.h"
#include "device/device_communicator.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace lists {
namespace {

using DeviceComm = std::shared_ptr<DeviceCommunicator>;
using Work_ = std::unique_ptr<PendingWork>;

Work_ started(const DeviceComm& comm, Work_ work, Communicator::WorkPtr operation) {
  work->start_pinned(comm, std::move(operation));
  return work;
}

CollectiveType verb_of(const std::string& text) {
  for (const CollectiveType verb :
       {CollectiveType::allreduce, CollectiveType::reduce, CollectiveType::bcast, CollectiveType::allgather}) {
    if (name(verb) == text) return verb;
  }
  throw InvalidArgumentError("not for lists of arrays: " + text);
}

DType dtype_of(const std::string& text) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name(static_cast<DType>(i)) == text) return static_cast<DType>(i);
  }
  throw InvalidArgumentError("no dtype: " + text);
}

Work_ check_list_signature(const DeviceComm& comm, const std::string& verb, const std::string& dtype, int op, int root,
                           std::size_t length, std::size_t count, int number, int detail) {
  return started(
      comm, std::make_unique<PendingWork>(),
      comm->cliques().check_signature(
          {verb_of(verb), dtype_of(dtype), {static_cast<ReduceOp>(op), 1.0}, root, length, count, number, detail}));
}

/// The arrays of the ranks, which each has combined to one in host memory. `list`: what ranks compare.
Work_ start_on_host(const std::shared_ptr<Communicator>& comm, const std::string& verb, const py::object& x,
                    const py::object& out, int op, int root, const std::string& dtype, int compared_op,
                    std::size_t length, std::size_t count, std::size_t root_array) {
  auto work = std::make_unique<PendingWork>();
  CollectiveArgs args{.type = verb_of(verb), .root = root};
  args.reduction.op = static_cast<ReduceOp>(op);
  args.compared_as = Signature{args.type, dtype_of(dtype), static_cast<ReduceOp>(compared_op), root,
                               ListShape{length, count, 0, root_array}.shape()};
  args.out = work->output(out, "a list of arrays", /*copy_in=*/true);
  args.in = x.is(out) ? ConstBuffer(args.out) : work->input(x, "a list of arrays");
  auto operation = comm->start(args);
  work->start(comm, std::move(operation));
  return work;
}

int add_list(const DeviceComm& comm, std::vector<int> devices, double timeout) {
  const py::gil_scoped_release no_gil;
  return comm->cliques().add(std::move(devices), Deadline::after(Seconds(timeout)));
}

Work_ allreduce_list(const DeviceComm& comm, int number, const py::list& arrays, const py::list& outs, int op,
                     double factor) {
  auto work = std::make_unique<PendingWork>();
  std::vector<InOut> buffers;
  for (py::size_t i = 0; i < py::len(arrays); ++i) {
    // Row-major, the default order: what ranks compare of a list does not say how its arrays lie.
    const py::object array = arrays[i], out = outs[i];
    buffers.push_back(work->in_out(array, out, "allreduce"));
  }
  auto operation = comm->cliques().allreduce(number, buffers, {static_cast<ReduceOp>(op), factor});
  return started(comm, std::move(work), std::move(operation));
}

Work_ reduce_list(const DeviceComm& comm, int number, const py::list& arrays, const py::object& out, int op,
                  double factor, int root, int root_array) {
  auto work = std::make_unique<PendingWork>();
  std::vector<ConstBuffer> in;
  for (const py::handle array : arrays) in.push_back(work->input(array, "reduce"));
  const Buffer to = out.is_none() ? Buffer{} : work->output(out, "reduce", /*copy_in=*/true);
  auto operation = comm->cliques().reduce(number, in, to, {static_cast<ReduceOp>(op), factor}, root, root_array);
  return started(comm, std::move(work), std::move(operation));
}

Work_ bcast_list(const DeviceComm& comm, int number, const py::list& arrays, int root, int root_array) {
  auto work = std::make_unique<PendingWork>();
  std::vector<Buffer> buffers;
  for (const py::handle array : arrays) {
    if (comm->rank() != root || static_cast<int>(buffers.size()) != root_array) {
      buffers.push_back(work->output(array, "bcast", /*copy_in=*/false));
      continue;
    }
    const ConstBuffer in = work->input(array, "bcast");  // only read there: it may be read-only
    buffers.push_back({const_cast<void*>(in.data), in.count, in.dtype, in.device, in.stream});
  }
  auto operation = comm->cliques().bcast(number, buffers, root, root_array);
  return started(comm, std::move(work), std::move(operation));
}

Work_ allgather_list(const DeviceComm& comm, int number, const py::list& arrays, const std::vector<py::list>& outs) {
  auto work = std::make_unique<PendingWork>();
  std::vector<ConstBuffer> in;
  std::vector<std::vector<Buffer>> to;
  for (const py::handle array : arrays) in.push_back(work->input(array, "allgather"));
  for (const py::list& pieces : outs) {
    to.emplace_back();
    for (const py::handle piece : pieces) to.back().push_back(work->output(piece, "allgather", /*copy_in=*/false));
  }
  auto operation = comm->cliques().allgather(number, in, to);
  return started(comm, std::move(work), std::move(operation));
}

}  // namespace
}  // namespace lists

void bind_lists(py::module_& m) {
  using namespace lists;
  m.def(
      "list_number",
      [](const DeviceComm& comm, const std::vector<int>& devices) { return comm->cliques().clique_id(devices); },
      "comm"_a, "devices"_a, "The number of a list of devices in this group, 0 where it is new.");
  m.def("check_list_signature", &check_list_signature, "comm"_a, "verb"_a, "dtype"_a, "op"_a, "root"_a, "length"_a,
        "count"_a, "number"_a, "detail"_a, "Compares a call on lists of arrays over all ranks.");
  m.def("start_list_on_host", &start_on_host, "comm"_a, "verb"_a, "x"_a, "out"_a, "op"_a, "root"_a, "dtype"_a,
        "compared_op"_a, "length"_a, "count"_a, "root_array"_a,
        "A collective of one array of each rank, where ranks compare the lists that these were made of.");
  m.def(
      "fail_list_check",
      [](const DeviceComm& comm, const std::string& text) {
        // Some ranks may have called NCCL and others not, so nothing that is enqueued later can be relied on.
        comm->cliques().mismatch_error(std::make_exception_ptr(MismatchError(text)));
      },
      "comm"_a, "text"_a, "Ranks differ, in NCCL perhaps too: device memory cannot be used in this group any more.");
  m.def("add_list", &add_list, "comm"_a, "devices"_a, "timeout"_a,
        "Gives a list of devices the next number, and a clique of NCCL. Collective.");
  m.def("allreduce_list", &allreduce_list, "comm"_a, "number"_a, "arrays"_a, "outs"_a, "op"_a, "factor"_a,
        "In place where an item of `outs` is that of `arrays`.");
  m.def("reduce_list", &reduce_list, "comm"_a, "number"_a, "arrays"_a, "out"_a.none(true), "op"_a, "factor"_a, "root"_a,
        "root_array"_a);
  m.def("bcast_list", &bcast_list, "comm"_a, "number"_a, "arrays"_a, "root"_a, "root_array"_a);
  m.def("allgather_list", &allgather_list, "comm"_a, "number"_a, "arrays"_a, "outs"_a,
        "Into one array for each list entry, or one for each array of all ranks.");
}

}  // namespace samestep
