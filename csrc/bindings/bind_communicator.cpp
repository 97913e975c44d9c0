#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/pending_work.h"
#include "bindings/python_errors.h"
#include "communicator/communicator.h"
#include "communicator/self_communicator.h"
#include "core/error.h"
#include "kernels/isa.h"
#include "os/cpu_set.h"
#include "os/exit_later.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

using Comm = std::shared_ptr<Communicator>;
using Counts = std::vector<std::uint64_t>;
using Work_ = std::unique_ptr<PendingWork>;

Reduction reduction(int op, double factor) { return {static_cast<ReduceOp>(op), factor}; }

/// Block `i` of `buffer`, where each has so many bytes.
const void* block(const ConstBuffer& buffer, int i, std::size_t nbytes) {
  if (buffer.data == nullptr) return nullptr;
  return static_cast<const std::byte*>(buffer.data) + static_cast<std::size_t>(i) * nbytes;
}

/// Where the input begins if this rank's part of the result takes the place of its block of it: nobody else needs that.
const void* input_around(const ConstBuffer& in, const Buffer& out, int rank) {
  return out.data == block(in, rank, out.nbytes()) ? in.data : nullptr;
}

Work_ started(const Comm& comm, Work_ work, Communicator::WorkPtr operation) {
  work->start(comm, std::move(operation));
  return work;
}

Work_ all_reduce(const Comm& comm, const py::object& x, const py::object& out, int op, double factor) {
  auto work = std::make_unique<PendingWork>();
  const auto [in, to] = work->in_out(x, out, "allreduce");
  return started(comm, std::move(work), comm->all_reduce(in, to, reduction(op, factor), work->shape()));
}

Work_ reduce(const Comm& comm, const py::object& x, const py::object& out, int op, double factor, int root) {
  auto work = std::make_unique<PendingWork>();
  if (comm->rank() != root) {
    const ConstBuffer in = work->input(x, "reduce");
    return started(comm, std::move(work), comm->reduce(in, {}, reduction(op, factor), root, work->shape()));
  }
  const auto [in, to] = work->in_out(x, out, "reduce");
  return started(comm, std::move(work), comm->reduce(in, to, reduction(op, factor), root, work->shape()));
}

Work_ broadcast(const Comm& comm, const py::object& x, int root) {
  auto work = std::make_unique<PendingWork>();
  if (comm->rank() == root) {  // only read there: root's array may be read-only
    const ConstBuffer in = work->input(x, "bcast");
    const Buffer both{const_cast<void*>(in.data), in.count, in.dtype, in.device, in.stream};
    return started(comm, std::move(work), comm->broadcast(both, root, work->shape()));
  }
  const Buffer both = work->output(x, "bcast", /*copy_in=*/false);
  return started(comm, std::move(work), comm->broadcast(both, root, work->shape()));
}

Work_ all_gather(const Comm& comm, const py::object& x, const py::object& out) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = work->output(out, "allgather", false);
  ConstBuffer in = work->input(x, "allgather");
  in = work->apart(in, to, block(to, comm->rank(), in.nbytes()));
  return started(comm, std::move(work), comm->all_gather(in, to, work->shape()));
}

Work_ all_gather_v(const Comm& comm, const py::object& x, const py::object& out, const Counts& counts) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = work->output(out, "allgatherv", false);
  const ConstBuffer in = work->apart(work->input(x, "allgatherv"), to);
  return started(comm, std::move(work), comm->all_gather_v(in, to, counts));
}

Work_ gather(const Comm& comm, const py::object& x, const py::object& out, int root) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = comm->rank() == root ? work->output(out, "gather", false) : Buffer{};
  ConstBuffer in = work->input(x, "gather");
  in = work->apart(in, to, block(to, comm->rank(), in.nbytes()));
  return started(comm, std::move(work), comm->gather(in, to, root, work->shape()));
}

Work_ gather_v(const Comm& comm, const py::object& x, const py::object& out, const Counts& counts, int root) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = comm->rank() == root ? work->output(out, "gatherv", false) : Buffer{};
  const ConstBuffer in = work->apart(work->input(x, "gatherv"), to);
  return started(comm, std::move(work), comm->gather_v(in, to, counts, root));
}

Work_ scatter(const Comm& comm, const py::object& x, const py::object& out, int root) {
  auto work = std::make_unique<PendingWork>();
  ConstBuffer in = comm->rank() == root ? work->input(x, "scatter") : ConstBuffer{};
  const Buffer to = work->output(out, "scatter", false);
  in = work->apart(in, to, input_around(in, to, comm->rank()));
  return started(comm, std::move(work), comm->scatter(in, to, root, work->shape()));
}

Work_ scatter_v(const Comm& comm, const py::object& x, const py::object& out, const Counts& counts, int root) {
  auto work = std::make_unique<PendingWork>();
  ConstBuffer in = comm->rank() == root ? work->input(x, "scatterv") : ConstBuffer{};
  const Buffer to = work->output(out, "scatterv", false);
  in = work->apart(in, to);
  return started(comm, std::move(work), comm->scatter_v(in, counts, to, root));
}

Work_ reduce_scatter(const Comm& comm, const py::object& x, const py::object& out, int op, double factor) {
  auto work = std::make_unique<PendingWork>();
  ConstBuffer in = work->input(x, "reduce_scatter");
  const Buffer to = work->output(out, "reduce_scatter", false);
  in = work->apart(in, to, input_around(in, to, comm->rank()));
  return started(comm, std::move(work), comm->reduce_scatter(in, to, reduction(op, factor), work->shape()));
}

Work_ all_to_all(const Comm& comm, const py::object& x, const py::object& out) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = work->output(out, "alltoall", false);
  const ConstBuffer in = work->apart(work->input(x, "alltoall"), to);
  return started(comm, std::move(work), comm->all_to_all(in, to, work->shape()));
}

Work_ all_to_all_v(const Comm& comm, const py::object& x, const Counts& sent, const py::object& out,
                   const Counts& received) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = work->output(out, "alltoallv", false);
  const ConstBuffer in = work->apart(work->input(x, "alltoallv"), to);
  return started(comm, std::move(work), comm->all_to_all_v(in, sent, to, received));
}

Work_ barrier(const Comm& comm) { return started(comm, std::make_unique<PendingWork>(), comm->barrier()); }

Work_ send(const Comm& comm, const py::object& x, int dest, int tag) {
  auto work = std::make_unique<PendingWork>();
  const ConstBuffer in = work->input(x, "send");
  return started(comm, std::move(work), comm->send(in, dest, tag));
}

Work_ recv(const Comm& comm, const py::object& out, int source, int tag) {
  auto work = std::make_unique<PendingWork>();
  const Buffer to = work->output(out, "recv", false);
  return started(comm, std::move(work), comm->recv(to, source, tag));
}

void bind_work(py::module_& m) {
  py::class_<Status>(m, "Status", "Who sent a received message, with which tag, and how many elements.")
      .def_readonly("source", &Status::source)
      .def_readonly("tag", &Status::tag)
      .def_readonly("count", &Status::count);
  py::class_<PendingWork>(m, "Work", "One operation under way, with the arrays it works on.")
      .def("done", &PendingWork::done)
      .def(
          "wait",
          [](PendingWork& self, double timeout, bool ends_group, bool on_host) {
            using AtDeadline = PendingWork::AtDeadline;
            self.wait(timeout, ends_group ? AtDeadline::abandon : AtDeadline::goes_on, 64, on_host);
          },
          "timeout"_a, "ends_group"_a, "on_host"_a = false)
      .def("exception",
           [](const PendingWork& self) {
             return self.error() ? py::reinterpret_steal<py::object>(make_python_error(self.error())) : py::none();
           })
      .def("status", &PendingWork::status)
      .def("cancel", &PendingWork::cancel);
  py::class_<Communicator::Counters>(m, "Counters", "What a group has done so far.")
      .def_readonly("operations", &Communicator::Counters::operations)
      .def_readonly("messages", &Communicator::Counters::messages)
      .def_readonly("bytes", &Communicator::Counters::bytes);
}

}  // namespace

void bind_communicator(py::module_& m) {
  bind_work(m);
  py::class_<Communicator, Comm>(m, "Communicator", "A group of ranks; see csrc/communicator/communicator.h.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("usable", &Communicator::usable)
      .def_property_readonly("engine", [](const Communicator& self) { return std::string(self.engine()); })
      .def("all_reduce", &all_reduce, "x"_a, "out"_a, "op"_a, "factor"_a)
      .def("reduce", &reduce, "x"_a, "out"_a, "op"_a, "factor"_a, "root"_a)
      .def("broadcast", &broadcast, "x"_a, "root"_a)
      .def("all_gather", &all_gather, "x"_a, "out"_a)
      .def("all_gather_v", &all_gather_v, "x"_a, "out"_a, "counts"_a)
      .def("gather", &gather, "x"_a, "out"_a, "root"_a)
      .def("gather_v", &gather_v, "x"_a, "out"_a, "counts"_a, "root"_a)
      .def("scatter", &scatter, "x"_a, "out"_a, "root"_a)
      .def("scatter_v", &scatter_v, "x"_a, "out"_a, "counts"_a, "root"_a)
      .def("reduce_scatter", &reduce_scatter, "x"_a, "out"_a, "op"_a, "factor"_a)
      .def("all_to_all", &all_to_all, "x"_a, "out"_a)
      .def("all_to_all_v", &all_to_all_v, "x"_a, "sent"_a, "out"_a, "received"_a)
      .def("barrier", &barrier)
      .def("send", &send, "x"_a, "dest"_a, "tag"_a)
      .def("recv", &recv, "out"_a, "source"_a, "tag"_a)
      .def(
          "split",
          [](Communicator& self, int color, int key, double timeout) {
            const py::gil_scoped_release no_gil;
            return self.split(color, key, Deadline::after(Seconds(timeout)));
          },
          "color"_a, "key"_a, "timeout"_a)
      .def(
          "group",
          [](Communicator& self, const std::vector<int>& ranks, double timeout) {
            const py::gil_scoped_release no_gil;
            return self.group(ranks, Deadline::after(Seconds(timeout)));
          },
          "ranks"_a, "timeout"_a)
      .def("progress", &Communicator::progress)
      .def(
          "close",
          [](Communicator& self, double timeout) {
            const py::gil_scoped_release no_gil;
            self.close(Deadline::after(Seconds(timeout)));
          },
          "timeout"_a)
      .def(
          "abandon",
          [](Communicator& self, const std::string& reason) {
            self.abandon(std::make_exception_ptr(PeerLostError(reason)), reason);
          },
          "reason"_a)
      .def("set_hosts", &Communicator::set_hosts, "hosts"_a)
      .def("set_terms", &Communicator::set_terms, "way"_a, "window_piece"_a, "max_message"_a)
      .def("prefer_pieces", &Communicator::prefer_pieces, "nbytes"_a)
      .def("set_oversubscribed", &Communicator::set_oversubscribed, "oversubscribed"_a)
      .def("counters", &Communicator::counters);
  m.def("make_self_communicator", &make_self_communicator, "name"_a);
  m.def("exit_later", &exit_later, "seconds"_a, "code"_a, "why"_a,
        "End this process with `code` after `seconds`, unless it has ended by then.");
  m.def(
      "isa_name", [] { return std::string(kernels::isa_name()); },
      "Instruction set of the reductions: portable, avx2 or avx512.");
  m.def("select_isa", &kernels::select_isa, "name"_a,
        "Reduce with this instruction set from now on; the bits are the same.");
  m.def("usable_cpus", &usable_cpus, "CPUs this process may use at once: affinity and control group.");
}

}  // namespace samestep
