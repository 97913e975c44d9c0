#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "exchange/operation.h"
#include "node/direct_reduction.h"
#include "node/node_group.h"
#include "node/reduction_task.h"
#include "node/staged_reduction.h"

namespace samestep {

/// allreduce, reduce and reduce_scatter of more than a line holds, over the memory of the ranks of one host. Every
/// element is reduced by one rank, in pairwise order of rank, and its bits are stored wherever they are wanted.
///
/// Ranks announce where their buffers are, and the elements too where those are few. What they all see then decides:
///   together: the elements lie behind the announcements; every rank reduces all of them for itself;
///   direct:   see DirectReduction;
///   staged:   see StagedReduction.
class NodeReduction final : public Collective {
 public:
  NodeReduction(std::shared_ptr<Engine> engine, const Signature& signature, std::shared_ptr<NodeGroup> group,
                ConstBuffer in, Buffer out, const Reduction& reduction);

  /// Everybody has announced an allreduce and agrees: reduces at once if all elements lie behind the announcements.
  static bool reduce_announced(Engine& engine, std::uint64_t sequence, ConstBuffer in, Buffer out, ReduceOp op);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  bool keeps_meeting() const override { return true; }
  std::vector<int> awaited() override;

 private:
  bool stages_ahead();
  void gather();
  void reduce_together();
  bool finish_together();

  using Way = WayChoice::Way;

  std::shared_ptr<NodeGroup> group_;
  ReductionTask task_;
  std::vector<Meeting::Bytes> elements_;  // by rank
  std::optional<DirectReduction> direct_;
  std::optional<StagedReduction> staged_;
  Way way_ = Way::staged;
  bool timed_ = false;
  std::vector<std::byte> result_;  // together: what waits until others have read this rank's buffer
};

}  // namespace samestep
