#include "communicator/call.h"

#include "communicator/checks.h"
#include "communicator/communicator.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

bool reduces(Verb verb) { return verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter; }

DType dtype_of(const Call& call) { return call.verb == Verb::broadcast ? call.out.dtype : call.in.dtype; }
ReduceOp op_of(const Call& call) { return reduces(call.verb) ? call.reduction.op : ReduceOp::sum; }

}  // namespace

Signature Call::signature() const {
  if (verb == Verb::barrier) return {};
  return {verb, dtype_of(*this), op_of(*this), root, shape};
}

std::uint64_t Call::digest() const {
  if (verb == Verb::barrier) return signature().digest();
  return samestep::digest(verb, dtype_of(*this), op_of(*this), root, shape);
}

Communicator::WorkPtr Communicator::begin(const Call& call) {
  switch (call.verb) {
    case Verb::all_reduce:
      return all_reduce(call.in, call.out, call.reduction, call.shape);
    case Verb::reduce:
      return reduce(call.in, call.out, call.reduction, call.root, call.shape);
    case Verb::broadcast:
      return broadcast(call.out, call.root, call.shape);
    case Verb::all_gather:
      return all_gather(call.in, call.out, call.shape);
    case Verb::reduce_scatter:
      return reduce_scatter(call.in, call.out, call.reduction, call.shape);
    case Verb::all_to_all:
      return all_to_all(call.in, call.out, call.shape);
    case Verb::barrier:
      return barrier();
    default:
      throw Error(str("a Call cannot describe ", samestep::name(call.verb)));
  }
}

void checks::arguments(const Call& call, int rank, int size) {
  const std::string_view verb = name(call.verb);
  const bool has_out = call.verb != Verb::reduce || rank == call.root;
  if (call.root != -1 || call.verb == Verb::reduce || call.verb == Verb::broadcast) {
    root_in_group(verb, call.root, size);
  }
  if (call.verb == Verb::barrier) return;
  if (has_out) on_host(verb, call.out);
  if (call.verb == Verb::broadcast) return;
  on_host(verb, call.in);
  if (reduces(call.verb)) require_reducible(call.in.dtype, call.reduction);
  if (!has_out) return;
  same_dtype(verb, call.in, call.out);
  const auto n_ranks = static_cast<std::uint64_t>(size);
  if (call.verb == Verb::all_gather) {
    has_count(verb, "out", call.out, call.in.count * n_ranks);
  } else if (call.verb == Verb::reduce_scatter) {
    has_count(verb, "the input", call.in, call.out.count * n_ranks);
  } else {
    has_count(verb, "out", call.out, call.in.count);
  }
  if (call.verb == Verb::all_to_all && call.in.count % n_ranks != 0) {
    throw InvalidArgumentError(
        str("alltoall: ", call.in.count, " elements are no whole number of blocks for ", size, " ranks"));
  }
}

}  // namespace samestep
