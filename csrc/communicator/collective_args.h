#pragma once

#include <optional>
#include <span>

#include "communicator/signature.h"
#include "core/buffer.h"
#include "core/reduce_op.h"

namespace samestep {

/// How many elements the blocks of a collective have, on whatever rank.
struct BlockLengths {
  std::uint64_t longest;  ///< of the longest block
  std::uint64_t busiest;  ///< of all blocks together that the busiest rank sends or receives
};

// clang-format off
/// The arguments of one collective on this rank. `p` is the size of the group.
///
/// | type           | `in`                      | `out`                              | more                |
/// |----------------|---------------------------|------------------------------------|---------------------|
/// | allreduce      | n elements                | n                                  | `reduction`         |
/// | reduce         | n                         | n, at root                         | `reduction`, `root` |
/// | reduce_scatter | p * n                     | n                                  | `reduction`         |
/// | bcast          | -                         | n: read at root, written elsewhere | `root`              |
/// | allgather[v]   | n                         | p * n [`counts`]                   |                     |
/// | gather[v]      | n                         | p * n [`counts`], at root          | `root`              |
/// | scatter[v]     | p * n [`counts`], at root | n                                  | `root`              |
/// | alltoall[v]    | p * n [`counts`]          | p * n [`recv_counts`]              |                     |
/// | barrier        | -                         | -                                  |                     |
///
/// Buffers that the table restricts to root are ignored on other ranks. The two buffers are the same memory (in place) or
/// do not overlap. `out` of reduce_scatter may also be block `rank` of `in`; alltoall does not work in place. Device
/// memory may overlap arbitrarily.
// clang-format on
struct CollectiveArgs {
  CollectiveType type;
  ConstBuffer in = {};
  Buffer out = {};
  Reduction reduction = {};
  int root = -1;
  Shape shape = {};                            ///< of the caller's array of n elements; only compared between ranks
  std::span<const std::uint64_t> counts = {};  ///< of a `v` variant: elements by rank; read only during the call
  std::span<const std::uint64_t> recv_counts = {};
  /// Of a `v` variant: the same on all ranks, which then divide it into the same windows, or nothing on all.
  std::optional<BlockLengths> lengths = {};
  std::optional<Signature> compared_as = {};  ///< what ranks compare, if this is a step of another call

  /// Whether the rank reads `in`, or writes `out`. For bcast `out` is both.
  bool uses_in(int rank) const {
    if (type == CollectiveType::barrier || type == CollectiveType::bcast) return false;
    return !(type == CollectiveType::scatter || type == CollectiveType::scatterv) || rank == root;
  }
  bool uses_out(int rank) const {
    if (type == CollectiveType::barrier) return false;
    const bool only_root =
        type == CollectiveType::reduce || type == CollectiveType::gather || type == CollectiveType::gatherv;
    return !only_root || rank == root;
  }
  /// The array of n elements that every rank has.
  ConstBuffer own() const {
    const bool is_out = type == CollectiveType::bcast || type == CollectiveType::scatter ||
                        type == CollectiveType::scatterv || type == CollectiveType::reduce_scatter;
    return is_out ? ConstBuffer(out) : in;
  }

  Signature signature() const;
  std::uint64_t digest() const;  ///< of the signature
};

namespace checks {

/// Checks that the arguments of this rank are consistent, and in host memory if `needs_host_memory`. Throws
/// InvalidArgumentError and UnavailableError.
void arguments(const CollectiveArgs& args, int rank, int size, bool needs_host_memory = true);

}  // namespace checks

}  // namespace samestep
