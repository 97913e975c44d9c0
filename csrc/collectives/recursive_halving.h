#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "collectives/recursive_run.h"
#include "core/buffer.h"
#include "engine/operation.h"
#include "engine/scratch.h"

namespace samestep {

/// An allreduce by recursive halving: each of n ranks sends 2 log2(n) messages for a segment; or by recursive doubling:
/// log2(n) messages. See RecursivePlan. A few segments are in flight at the same time. The bits are those of
/// TwoShotReduction.
class RecursiveHalvingAllreduce final : public Collective {
 public:
  /// RecursiveRun must support the dtype and operator. `scatter_first`: recursive halving, else doubling.
  RecursiveHalvingAllreduce(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args, bool scatter_first);

  /// Bytes of a segment, of which each of `n_ranks` reduces one part. `piece`: limit of a part in bytes, or 0.
  static std::size_t segment_nbytes(int n_ranks, std::size_t piece);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> pending_peers() override;
  void abort() override;

 private:
  struct Segment {
    Scratch::Block room;
    RecursiveRun run;
  };
  void open_next_segment();

  ConstBuffer in_;
  Buffer out_;
  Reduction reduction_;
  bool scatter_first_;
  std::size_t length_;  // elements of a segment
  std::size_t next_ = 0;
  std::deque<Segment> open_segments_;
};

}  // namespace samestep
