#pragma once

#include <deque>
#include <vector>

#include "collectives/recursive_run.h"
#include "hierarchy/hierarchical_collective.h"

namespace samestep {

/// A long allreduce over many hosts. It differs from HierarchicalCollective in how the leaders of a chunk combine their
/// partial results: by recursive halving or doubling (see RecursivePlan). Chunks are longer, so that half a chunk is
/// worth a message. The bits are those of HierarchicalCollective.
class HierarchicalRecursiveAllreduce final : public HierarchicalCollective {
 public:
  /// `scatter_first`: see RecursivePlan.
  HierarchicalRecursiveAllreduce(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args,
                                 std::shared_ptr<HierarchicalGroup> group, bool scatter_first);

 protected:
  bool work_on_chunks() override;
  void take_scratch() override {}
  std::vector<int> pending_chunk_peers() override;
  void abort() override;

 private:
  struct Open {
    HierarchicalChunk chunk;
    std::vector<int> leaders;  // by host
    Scratch::Block block;      // the sum over this host's ranks, and the scratch memory of the run
    RecursiveRun run;
  };

  void open_next();
  /// The sum over this host: `into`, or the elements of its only rank in place.
  const std::byte* local_sum(const HierarchicalChunk& chunk, std::byte* into);

  bool scatter_first_;
  std::deque<Open> open_;
};

}  // namespace samestep
