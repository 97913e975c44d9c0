#include "communicator/collective_args.h"

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "process/user_call.h"

namespace samestep {
namespace {

ReduceOp op_of(const CollectiveArgs& args) { return reduces(args.type) ? args.reduction.op : ReduceOp::sum; }

/// Prefixes the error with the name of the user's call.
void can_reduce(std::string_view verb, const CollectiveArgs& args) {
  try {
    require_reducible(args.in.dtype, args.reduction);
  } catch (const InvalidArgumentError& error) {
    throw InvalidArgumentError(str(user_call().empty() ? verb : std::string_view(user_call()), ": ", error.what()));
  }
}

void counts_within_longest(std::string_view verb, const CollectiveArgs& args) {
  if (!args.lengths.has_value()) return;
  for (const auto counts : {args.counts, args.recv_counts}) {
    for (const std::uint64_t count : counts) {
      if (count > args.lengths->longest) {
        throw InvalidArgumentError(
            str(verb, ": a block has ", count, " elements, but the longest is said to have ", args.lengths->longest));
      }
    }
  }
}

/// Checks the counts on a rank that uses both buffers.
void counts_match(std::string_view verb, const CollectiveArgs& args, int rank, int size) {
  const auto n_ranks = static_cast<std::uint64_t>(size);
  const auto own_count = [&] { return args.counts[static_cast<std::size_t>(rank)]; };
  switch (args.type) {
    case CollectiveType::allgather:
    case CollectiveType::gather:
      return checks::has_count(verb, "out", args.out, args.in.count * n_ranks);
    case CollectiveType::reduce_scatter:
    case CollectiveType::scatter:
      return checks::has_count(verb, "the input", args.in, args.out.count * n_ranks);
    case CollectiveType::allgatherv:
    case CollectiveType::gatherv:
      // In the `v` forms ranks pass different counts by design, so each can only compare them with its own arrays.
      checks::counts_fill(verb, "counts", args.counts, size, args.out);
      return checks::has_count(verb, "the input", args.in, own_count());
    case CollectiveType::scatterv:
      checks::counts_fill(verb, "counts", args.counts, size, args.in);
      return checks::has_count(verb, "out", args.out, own_count());
    case CollectiveType::alltoallv:
      checks::counts_fill(verb, "send counts", args.counts, size, args.in);
      return checks::counts_fill(verb, "receive counts", args.recv_counts, size, args.out);
    default:
      checks::has_count(verb, "out", args.out, args.in.count);
  }
  if (args.type == CollectiveType::alltoall && args.in.count % n_ranks != 0) {
    throw InvalidArgumentError(
        str("alltoall: ", args.in.count, " elements are no whole number of blocks for ", size, " ranks"));
  }
}

}  // namespace

Signature CollectiveArgs::signature() const {
  if (compared_as) return *compared_as;
  // A default signature, whatever the other fields hold: a barrier has no arguments in which ranks could differ.
  if (type == CollectiveType::barrier) return {};
  return {type, own().dtype, op_of(*this), root, has_counts(type) ? Shape{} : shape};
}

std::uint64_t CollectiveArgs::digest() const {
  // The frequent types avoid a Signature, and with it a copy of the shape: a copy of what was just written in parts has
  // to wait for those stores.
  if (compared_as || type == CollectiveType::barrier || has_counts(type)) return signature().digest();
  return samestep::digest(type, own().dtype, op_of(*this), root, shape);
}

void checks::arguments(const CollectiveArgs& args, int rank, int size, bool needs_host_memory) {
  if (args.type == CollectiveType::barrier) return;
  const std::string_view verb = name(args.type);
  if (has_root(args.type)) root_in_group(verb, args.root, size);
  const bool has_in = args.uses_in(rank), has_out = args.uses_out(rank);
  if (needs_host_memory && has_out) checks::in_host_memory(verb, args.out);
  if (needs_host_memory && has_in) checks::in_host_memory(verb, args.in);
  if (reduces(args.type)) can_reduce(verb, args);
  counts_within_longest(verb, args);
  // A rank with one buffer has nothing to compare it with; the signatures show whether it agrees with the others.
  if (!has_in || !has_out) return;
  same_dtype(verb, args.in, args.out);
  counts_match(verb, args, rank, size);
}

}  // namespace samestep
