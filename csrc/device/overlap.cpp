#include "device/overlap.h"

#include <numeric>

namespace samestep {
namespace {

/// The first byte of block `rank` of `all`; without counts all blocks have `nbytes`.
const std::byte* block(const ConstBuffer& all, std::size_t nbytes, const CollectiveArgs& args, int rank) {
  auto at = static_cast<std::size_t>(rank);
  if (args.counts.empty()) {
    at *= nbytes;
  } else {
    const auto before = args.counts.first(at);
    at = std::accumulate(before.begin(), before.end(), std::size_t{0}) * itemsize(all.dtype);
  }
  return static_cast<const std::byte*>(all.data) + at;
}

bool is_in_place(const CollectiveArgs& args, int rank) {
  switch (args.type) {
    case CollectiveType::allreduce:
    case CollectiveType::reduce:
      return args.in.data == args.out.data;
    case CollectiveType::allgather:
    case CollectiveType::allgatherv:
    case CollectiveType::gather:
    case CollectiveType::gatherv:
      return args.in.data == block(args.out, args.in.nbytes(), args, rank);
    case CollectiveType::reduce_scatter:
    case CollectiveType::scatter:
    case CollectiveType::scatterv:
      return args.out.data == block(args.in, args.out.nbytes(), args, rank);
    // NCCL sends and receives in no order that would let an alltoall work in place.
    default:
      return false;
  }
}

}  // namespace

bool overwrites_input(const CollectiveArgs& args, int rank) {
  if (!args.uses_in(rank) || !args.uses_out(rank)) return false;
  // By address, whatever the device: with unified addressing the memory of all devices has different addresses.
  if (!share_memory(args.in.data, args.in.nbytes(), args.out.data, args.out.nbytes())) return false;
  return !is_in_place(args, rank);
}

}  // namespace samestep
