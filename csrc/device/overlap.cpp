#include "device/overlap.h"

#include <algorithm>
#include <numeric>
#include <vector>

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

std::optional<std::pair<std::size_t, std::size_t>> find_conflict(std::span<const MemoryRange> ranges) {
  const auto begin = [&](std::size_t i) { return reinterpret_cast<std::uintptr_t>(ranges[i].data); };
  const auto end = [&](std::size_t i) { return begin(i) + ranges[i].nbytes; };
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].nbytes != 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, {}, begin);
  // What begins earlier and overlaps a range ends behind its begin. So those that end last show whether any does.
  std::optional<std::size_t> last, last_written;
  for (const std::size_t i : order) {
    const std::optional<std::size_t> other = ranges[i].written ? last : last_written;
    if (other && end(*other) > begin(i)) return std::minmax(*other, i);
    if (!last || end(i) > end(*last)) last = i;
    if (ranges[i].written && (!last_written || end(i) > end(*last_written))) last_written = i;
  }
  return std::nullopt;
}

}  // namespace samestep
