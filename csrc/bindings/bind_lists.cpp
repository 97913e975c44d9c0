#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/pending_work.h"
#include "core/error.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace lists {
namespace {

using Work_ = std::unique_ptr<PendingWork>;

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

/// The arrays of the ranks, which each has combined to one in host memory. `list`: what ranks compare.
Work_ start_on_host(const std::shared_ptr<Communicator>& comm, const std::string& verb, const py::object& x,
                    const py::object& out, int op, int root, const std::string& dtype, int compared_op,
                    std::size_t length, std::size_t count, std::size_t root_array) {
  auto work = std::make_unique<PendingWork>();
  CollectiveArgs args{.type = verb_of(verb), .root = root};
  args.reduction.op = static_cast<ReduceOp>(op);
  args.compared_as = Signature{args.type, dtype_of(dtype), static_cast<ReduceOp>(compared_op), root,
                               ListShape{length, count, root_array}.shape()};
  args.out = work->output(out, "a list of arrays", /*copy_in=*/true);
  args.in = x.is(out) ? ConstBuffer(args.out) : work->input(x, "a list of arrays");
  auto operation = comm->start(args);
  work->start(comm, std::move(operation));
  return work;
}

}  // namespace
}  // namespace lists

void bind_lists(py::module_& m) {
  using namespace lists;
  m.def("start_list_on_host", &start_on_host, "comm"_a, "verb"_a, "x"_a, "out"_a, "op"_a, "root"_a, "dtype"_a,
        "compared_op"_a, "length"_a, "count"_a, "root_array"_a,
        "A collective of one array of each rank, where ranks compare the lists that these were made of.");
}

}  // namespace samestep
