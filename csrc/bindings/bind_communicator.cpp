#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls/pending_work.h"
#include "calls/python_errors.h"
#include "collectives/exchange_communicator.h"
#include "communicator/communicator.h"
#include "communicator/self_communicator.h"
#include "core/error.h"
#include "device/overlap.h"
#include "jax/ranks_capsule.h"
#include "kernels/isa.h"
#include "os/exit_watchdog.h"
#include "process/user_call.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

using Comm = std::shared_ptr<Communicator>;
using Counts = std::vector<std::uint64_t>;
using Lengths = std::optional<std::pair<std::uint64_t, std::uint64_t>>;  // the members of BlockLengths
using Work_ = std::shared_ptr<PendingWork>;

std::optional<BlockLengths> block_lengths(const Lengths& lengths) {
  return lengths ? std::optional(BlockLengths{lengths->first, lengths->second}) : std::nullopt;
}

Work_ started(const Comm& comm, Work_ work, Communicator::WorkPtr operation) {
  work->start_alone(comm, std::move(operation));
  return work;
}

/// Sets the arrays of `args`. The array whose shape ranks compare is viewed last; see PendingWork::shape.
void bind_arrays(PendingWork& work, int rank, const py::object& x, const py::object& out, CollectiveArgs& args) {
  const std::string verb(name(args.type));
  const char* const what = verb.c_str();
  if (args.type == CollectiveType::bcast) {
    args.out = work.bcast(x, rank == args.root);
    return;
  }
  const bool has_in = args.uses_in(rank), has_out = args.uses_out(rank);
  // Off root `out` is ignored, and the input may be read-only, which `in_out` below would refuse.
  if (args.type == CollectiveType::reduce && !has_out) {
    args.in = work.input(x, what, PendingWork::Order::any);
    return;
  }
  if (args.type == CollectiveType::allreduce || args.type == CollectiveType::reduce) {
    const auto [in, to] = work.in_out(x, out, what, PendingWork::Order::any);
    args.in = in;
    args.out = to;
    return;
  }
  const bool out_is_compared = args.type == CollectiveType::scatter || args.type == CollectiveType::scatterv ||
                               args.type == CollectiveType::reduce_scatter;
  if (has_out && !out_is_compared) args.out = work.output(out, what, false, PendingWork::Order::row_major, ": out");
  if (has_in) args.in = work.input(x, what);
  if (has_out && out_is_compared) args.out = work.output(out, what, false, PendingWork::Order::row_major, ": out");
  // Nobody else accesses this rank's own block, so that in place no copy is needed. Counts have not been checked yet.
  if (share_memory(args.in, args.out) && (has_counts(args.type) || overwrites_input(args, rank))) {
    args.in = work.copy_of(args.in);
  }
}

/// `converted_from`: the caller's array, whose dtype ranks compare, if the elements have been converted.
Work_ start(const Comm& comm, CollectiveArgs args, const py::object& x, const py::object& out,
            const py::object& converted_from = py::none()) {
  auto work = std::make_shared<PendingWork>();
  if (args.type != CollectiveType::barrier) bind_arrays(*work, comm->rank(), x, out, args);
  args.shape = work->shape();
  if (!converted_from.is_none()) {
    args.compared_as = args.signature();
    args.compared_as->dtype = view_of(converted_from.ptr())->dtype;
  }
  return started(comm, std::move(work), comm->start(args));
}

Work_ allreduce(const Comm& comm, const py::object& x, const py::object& out, int op, double factor,
                const py::object& converted_from, double divisor) {
  const Reduction reduction{static_cast<ReduceOp>(op), factor, divisor};
  return start(comm, {.type = CollectiveType::allreduce, .reduction = reduction}, x, out, converted_from);
}
Work_ reduce_scatter(const Comm& comm, const py::object& x, const py::object& out, int op, double factor,
                     const py::object& converted_from) {
  const Reduction reduction{static_cast<ReduceOp>(op), factor};
  return start(comm, {.type = CollectiveType::reduce_scatter, .reduction = reduction}, x, out, converted_from);
}
template <CollectiveType type>
Work_ movement(const Comm& comm, const py::object& x, const py::object& out) {
  return start(comm, {.type = type}, x, out);
}
template <CollectiveType type>
Work_ rooted(const Comm& comm, const py::object& x, const py::object& out, int root) {
  return start(comm, {.type = type, .root = root}, x, out);
}
template <CollectiveType type>
Work_ rooted_v(const Comm& comm, const py::object& x, const py::object& out, const Counts& counts, int root,
               const Lengths& lengths) {
  return start(comm, {.type = type, .root = root, .counts = counts, .lengths = block_lengths(lengths)}, x, out);
}

Work_ reduce(const Comm& comm, const py::object& x, const py::object& out, int op, double factor, int root,
             const py::object& converted_from) {
  const Reduction reduction{static_cast<ReduceOp>(op), factor};
  return start(comm, {.type = CollectiveType::reduce, .reduction = reduction, .root = root}, x, out, converted_from);
}
Work_ bcast(const Comm& comm, const py::object& x, int root) {
  return start(comm, {.type = CollectiveType::bcast, .root = root}, x, x);
}
Work_ allgatherv(const Comm& comm, const py::object& x, const py::object& out, const Counts& counts,
                 const Lengths& lengths) {
  return start(comm, {.type = CollectiveType::allgatherv, .counts = counts, .lengths = block_lengths(lengths)}, x, out);
}
Work_ alltoallv(const Comm& comm, const py::object& x, const Counts& sent, const py::object& out,
                const Counts& received, const Lengths& lengths) {
  return start(
      comm,
      {.type = CollectiveType::alltoallv, .counts = sent, .recv_counts = received, .lengths = block_lengths(lengths)},
      x, out);
}
Work_ barrier(const Comm& comm) { return start(comm, {.type = CollectiveType::barrier}, py::none(), py::none()); }

/// The arrays of the ranks, which each has combined to one in host memory. `list`: what ranks compare.
Work_ start_list_on_host(const Comm& comm, const std::string& verb, const py::object& x, const py::object& out, int op,
                         int root, const std::string& dtype, int compared_op, std::size_t length, std::size_t count,
                         std::size_t root_array) {
  auto work = std::make_shared<PendingWork>();
  CollectiveArgs args{.type = collective_named(verb), .root = root};
  args.reduction.op = static_cast<ReduceOp>(op);
  args.compared_as = Signature{args.type, dtype_named(dtype), static_cast<ReduceOp>(compared_op), root,
                               ListShape{length, count, root_array}.shape()};
  args.out = work->output(out, "a list of arrays", /*copy_in=*/true);
  args.in = x.is(out) ? ConstBuffer(args.out) : work->input(x, "a list of arrays");
  work->start(comm, comm->start(args));
  return work;
}

void configure(Communicator& comm, std::optional<bool> torch_names, std::optional<std::vector<std::string>> hosts,
               std::optional<bool> oversubscribed, std::optional<std::string> algorithm,
               std::optional<std::size_t> segment_bytes, std::optional<std::size_t> default_segment_bytes,
               std::optional<std::size_t> max_message) {
  GroupSettings settings;
  if (torch_names) settings.naming = *torch_names ? Naming::torch : Naming::samestep;
  settings.hosts = std::move(hosts);
  settings.oversubscribed = oversubscribed;
  settings.algorithm = std::move(algorithm);
  settings.segment_bytes = segment_bytes;
  settings.default_segment_bytes = default_segment_bytes;
  settings.max_message = max_message;
  comm.configure(settings);
}

Work_ send(const Comm& comm, const py::object& x, int dest, int tag) {
  auto work = std::make_shared<PendingWork>(PendingWork::Kind::message);
  const ConstBuffer in = work->input(x, "send");
  return started(comm, std::move(work), comm->send(in, dest, tag));
}

Work_ send_object(const Comm& comm, const py::object& bytes, int dest, int tag) {
  auto work = std::make_shared<PendingWork>(PendingWork::Kind::message);
  const ConstBuffer in = work->input(bytes, "send_object");
  return started(comm, std::move(work), comm->send_object(in, dest, tag));
}

Work_ recv(const Comm& comm, const py::object& out, int source, int tag, bool exactly) {
  auto work = std::make_shared<PendingWork>(PendingWork::Kind::message);
  const Buffer to =
      work->output(out, "recv", /*copy_in=*/!exactly);  // a short message leaves the remaining elements as they are
  return started(comm, std::move(work), comm->recv(to, source, tag, exactly ? Fit::exactly : Fit::up_to));
}

Work_ recv_object(const Comm& comm, int source, int tag) {
  return started(comm, std::make_shared<PendingWork>(), comm->recv_object(source, tag));
}

Work_ probe(const Comm& comm, int source, int tag) {
  return started(comm, std::make_shared<PendingWork>(), comm->probe(source, tag));
}

void bind_work(py::module_& m) {
  py::class_<Status>(m, "Status", "Who sent a received message, with which tag, and how many elements.")
      .def_readonly("source", &Status::source)
      .def_readonly("tag", &Status::tag)
      .def_readonly("count", &Status::count);
  py::class_<PendingWork, Work_>(m, "Work", "A pending operation, with the arrays it works on.")
      .def("done", &PendingWork::done)
      .def(
          "wait",
          [](PendingWork& self, double timeout, bool ends_group, bool wait_on_host) {
            using AtDeadline = PendingWork::AtDeadline;
            // A blocking method returns the arrays to the caller, so an operation that is late ends with its group. A
            // Work that stays with the caller can be waited for again.
            self.wait(timeout, ends_group ? AtDeadline::abandon : AtDeadline::keep_running, 64, wait_on_host);
          },
          "timeout"_a, "ends_group"_a, "wait_on_host"_a = false)
      .def("exception",
           [](const PendingWork& self) {
             return self.error() ? py::reinterpret_steal<py::object>(make_python_error(self.error())) : py::none();
           })
      .def("status", &PendingWork::status)
      .def("claim", &PendingWork::claim, "arrays"_a, "owner"_a,
           "Other operations shall not use these arrays before `owner._settle()` has written them.")
      .def(
          "object",
          [](const PendingWork& self) {
            // Not copied: `keep_alive` holds the Work, which owns the bytes, as long as the memoryview lives.
            const auto bytes = self.object();
            return py::memoryview::from_memory(bytes.data(), static_cast<py::ssize_t>(bytes.size()));
          },
          py::keep_alive<0, 1>(), "The bytes of an object that was received; valid as long as this lives.")
      // A staged operation that ends asks the runtime how far its copies have come.
      .def("cancel", &PendingWork::cancel, py::call_guard<py::gil_scoped_release>())
      .def("give_back", &PendingWork::give_back, py::call_guard<py::gil_scoped_release>(),
           "Cancel a receive, whose message the next one gets, even if it has arrived; False for other operations.");
  py::class_<Communicator::Counters>(m, "Counters", "What a group has done so far.")
      .def_readonly("operations", &Communicator::Counters::operations)
      .def_readonly("messages", &Communicator::Counters::messages)
      .def_readonly("bytes", &Communicator::Counters::bytes);
}

}  // namespace

/// A context manager in Python.
struct CallText {
  std::string text;
  bool is_part;
  std::unique_ptr<UserCall> call;
};

void bind_user_call(py::module_& m) {
  py::class_<CallText>(m, "UserCall", "What the user called, for the texts of what is started in its `with` block.")
      .def(py::init([](std::string text, bool is_part) { return CallText{std::move(text), is_part, nullptr}; }),
           "text"_a, "is_part"_a = false)
      .def("__enter__",
           [](CallText& self) {
             self.call = std::make_unique<UserCall>(
                 self.text, self.is_part ? UserCall::Inside::part : UserCall::Inside::unchanged);
           })
      .def("__exit__", [](CallText& self, const py::args&) { self.call = nullptr; });
}

namespace {

using CommClass = py::class_<Communicator, Comm>;

void bind_collectives(CommClass& communicator) {
  communicator
      .def("allreduce", &allreduce, "x"_a, "out"_a, "op"_a, "factor"_a, "converted_from"_a = py::none(),
           "divisor"_a = 1.0)
      .def("reduce", &reduce, "x"_a, "out"_a, "op"_a, "factor"_a, "root"_a, "converted_from"_a = py::none())
      .def("reduce_scatter", &reduce_scatter, "x"_a, "out"_a, "op"_a, "factor"_a, "converted_from"_a = py::none())
      .def("bcast", &bcast, "x"_a, "root"_a)
      .def("allgather", &movement<CollectiveType::allgather>, "x"_a, "out"_a)
      .def("allgatherv", &allgatherv, "x"_a, "out"_a, "counts"_a, "lengths"_a = py::none())
      .def("gather", &rooted<CollectiveType::gather>, "x"_a, "out"_a, "root"_a)
      .def("gatherv", &rooted_v<CollectiveType::gatherv>, "x"_a, "out"_a, "counts"_a, "root"_a,
           "lengths"_a = py::none())
      .def("scatter", &rooted<CollectiveType::scatter>, "x"_a, "out"_a, "root"_a)
      .def("scatterv", &rooted_v<CollectiveType::scatterv>, "x"_a, "out"_a, "counts"_a, "root"_a,
           "lengths"_a = py::none())
      .def("alltoall", &movement<CollectiveType::alltoall>, "x"_a, "out"_a)
      .def("alltoallv", &alltoallv, "x"_a, "sent"_a, "out"_a, "received"_a, "lengths"_a = py::none())
      .def("barrier", &barrier);
}

void bind_messages(CommClass& communicator) {
  communicator.def("send", &send, "x"_a, "dest"_a, "tag"_a)
      .def("send_object", &send_object, "bytes"_a, "dest"_a, "tag"_a)
      .def("recv", &recv, "out"_a, "source"_a, "tag"_a, "exactly"_a = true)
      .def("recv_object", &recv_object, "source"_a, "tag"_a)
      .def("probe", &probe, "source"_a, "tag"_a);
}

void bind_groups(CommClass& communicator) {
  communicator
      .def(
          "split",
          [](Communicator& self, int color, int key, double timeout, const std::string& called) {
            const py::gil_scoped_release no_gil;
            return self.split(color, key, Deadline::after(Seconds(timeout)), called);
          },
          "color"_a, "key"_a, "timeout"_a, "called"_a = "")
      .def(
          "group",
          [](Communicator& self, const std::vector<int>& ranks, double timeout, const std::string& called) {
            const py::gil_scoped_release no_gil;
            return self.group(ranks, Deadline::after(Seconds(timeout)), called);
          },
          "ranks"_a, "timeout"_a, "called"_a = "")
      .def("configure", &configure, py::kw_only(), "torch_names"_a = py::none(), "hosts"_a = py::none(),
           "oversubscribed"_a = py::none(), "algorithm"_a = py::none(), "segment_bytes"_a = py::none(),
           "default_segment_bytes"_a = py::none(), "max_message"_a = py::none(),
           "See csrc/communicator/group_settings.h; `torch_names`: operations are spelt in texts of errors as "
           "torch.distributed does.");
}

/// From the first look at peers to the end of a group.
void bind_lifetime(CommClass& communicator) {
  // Without the GIL where operations on devices make a step or end: the runtime is asked, and may block.
  const py::call_guard<py::gil_scoped_release> without_gil;
  communicator
      .def(
          "close",
          [](Communicator& self, double timeout) {
            const py::gil_scoped_release no_gil;
            self.close(Deadline::after(Seconds(timeout)));
          },
          "timeout"_a)
      .def(
          "abandon",
          [](Communicator& self, const std::string& reason, bool finished) {
            // Peers learn the class: NotInitializedError means that the program has ended normally.
            self.abandon(finished ? std::make_exception_ptr(NotInitializedError(reason))
                                  : std::make_exception_ptr(PeerLostError(reason)),
                         reason);
          },
          "reason"_a, "finished"_a = false, without_gil)
      .def("counters", &Communicator::counters);
}

/// Ranks that leave, and blocks of `together()`.
void bind_membership(CommClass& communicator) {
  communicator.def("check_peers", [](Communicator& self) { self.membership().check_peers(); })
      .def(
          "revoke",
          [](Communicator& self, const std::string& why, std::uint64_t block) { self.membership().revoke(why, block); },
          "why"_a, "block"_a, py::call_guard<py::gil_scoped_release>())
      .def("is_revoked", [](Communicator& self) { return self.membership().is_revoked(); })
      .def(
          "discard",
          [](const Comm& self) {
            bool is_discarded = false;
            {
              const py::gil_scoped_release no_gil;  // devices are asked for the end of their copies
              is_discarded = self->membership().discard();
            }
            // Only from here on does no transport use the arrays of failed operations, which were kept for that reason.
            if (is_discarded) PendingWork::release_kept();
          },
          "Frees what `revoke` has left, once all ranks know of it.")
      .def(
          "open_block", [](Communicator& self, std::uint64_t block) { self.membership().open_block(block); }, "block"_a)
      .def(
          "close_block", [](Communicator& self, std::uint64_t block) { self.membership().close_block(block); },
          "block"_a)
      .def(
          "announce_block_end",
          [](Communicator& self, std::uint64_t block) { self.membership().announce_block_end(block); }, "block"_a);
}

/// Functions about the process and its processors.
void bind_process(py::module_& m) {
  m.def(
      "discard_abandoned_groups",
      [] {
        const std::size_t n_discarded = ProgressEngine::discard_abandoned();
        if (n_discarded != 0) PendingWork::release_kept();
        return n_discarded;
      },
      "Frees the groups that this rank has left, as far as all their other ranks have left them or ended; how many.");
  m.def("exit_watchdog", &exit_watchdog, "seconds"_a, "code"_a, "why"_a,
        "End this process with `code` after `seconds`, unless it has ended by then.");
  m.def(
      "isa_name", [] { return std::string(kernels::isa_name()); },
      "Instruction set of the reductions: portable, avx2 or avx512.");
  m.def("select_isa", &kernels::select_isa, "name"_a,
        "Reduce with this instruction set from now on; the bits are the same.");
}

}  // namespace

void bind_communicator(py::module_& m) {
  bind_work(m);
  bind_user_call(m);
  CommClass communicator(m, "Communicator", "A group of ranks; see csrc/communicator/communicator.h.");
  communicator.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("usable", &Communicator::usable)
      .def_property_readonly("transport", [](const Communicator& self) { return std::string(self.transport()); });
  bind_collectives(communicator);
  bind_messages(communicator);
  bind_groups(communicator);
  bind_lifetime(communicator);
  bind_membership(communicator);
  py::class_<ExchangeCommunicator, Communicator, std::shared_ptr<ExchangeCommunicator>>(
      m, "ExchangeCommunicator", "A group over a transport that moves messages.");
  m.def(
      "capsule_of",
      [](std::vector<Comm> ranks) {
        return py::capsule(
            // The library in csrc/jax links nothing of this one, so it gets the addresses of these functions.
            new RanksCapsule{std::move(ranks), &Communicator::run, &Communicator::start, &Communicator::start},
            RanksCapsule::kName, [](void* held) { delete static_cast<RanksCapsule*>(held); });
      },
      "ranks"_a, "Groups of this process, for the library that jaxlib loads.");
  m.def("start_list_on_host", &start_list_on_host, "comm"_a, "verb"_a, "x"_a, "out"_a, "op"_a, "root"_a, "dtype"_a,
        "compared_op"_a, "length"_a, "count"_a, "root_array"_a,
        "A collective of one array of each rank, where ranks compare the lists that these were made of.");
  m.def("make_self_communicator", &make_self_communicator, "name"_a);
  bind_process(m);
}

}  // namespace samestep
