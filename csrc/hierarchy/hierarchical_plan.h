#pragma once

#include <cstddef>

#include "communicator/signature.h"
#include "hierarchy/topology.h"

namespace samestep {

inline constexpr int kEverybody = -1;

/// A part of the elements that is reduced and sent as a unit.
struct HierarchicalChunk {
  std::size_t in_offset = 0;   ///< in the buffer of every contributor, in elements
  std::size_t out_offset = 0;  ///< in the buffer of every receiver
  std::size_t count = 0;
  int source = kEverybody;     ///< the rank that sends it; kEverybody: it is reduced over all ranks
  int wanted_by = kEverybody;  ///< the rank that receives it; kEverybody: all
  int root_host = 0;           ///< the host that combines it, and sends it to the others
};

/// The division of a long collective into chunks, and the leaders of each. On every host one rank, the leader of the
/// chunk, reduces the elements of its host and exchanges the result with the leaders of the other hosts. Pure: all
/// ranks compute the same.
///
/// The leaders of a chunk of a reduction or broadcast are the ranks of one lane; chunks are assigned to the lanes in
/// turn, and those of an allreduce also to the root hosts in turn. A rank that alone sends or receives a chunk is its
/// leader.
class HierarchicalPlan {
 public:
  /// `count`: elements of the buffer, or of one block of an allgather or reduce_scatter.
  /// `piece`: limit of a chunk in elements, > 0. `together`: all hosts combine each chunk, and `root_host` is unused.
  HierarchicalPlan(const Topology& topology, CollectiveType verb, int root, std::size_t count, std::size_t piece,
                   bool together = false);

  std::size_t chunks() const { return chunks_; }
  /// The chunks cover the elements exactly once; none is empty.
  HierarchicalChunk chunk(std::size_t number) const;
  int leader(std::size_t number, int host) const;
  /// Whether the rank is a leader of any chunk.
  bool has_work(int rank) const;
  /// The longest chunk, in elements.
  std::size_t longest() const { return length_; }

  bool reduces() const {
    return verb_ == CollectiveType::allreduce || verb_ == CollectiveType::reduce ||
           verb_ == CollectiveType::reduce_scatter;
  }
  /// Whether hosts other than the root host receive the result.
  bool spreads() const { return verb_ != CollectiveType::reduce && verb_ != CollectiveType::reduce_scatter; }

 private:
  bool has_blocks() const { return verb_ == CollectiveType::allgather || verb_ == CollectiveType::reduce_scatter; }

  const Topology* topology_;
  CollectiveType verb_;
  int root_;
  std::size_t count_;
  std::size_t length_ = 0;
  std::size_t per_block_ = 0;
  std::size_t chunks_ = 0;
};

}  // namespace samestep
