#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "engine/operation.h"
#include "node/node_group.h"
#include "node/reduction_context.h"
#include "node/single_copy_reduction.h"
#include "node/staged_reduction.h"

namespace samestep {

/// allreduce, reduce and reduce_scatter of more bytes than InlineCollective handles, among the ranks of one host. Sums
/// are in pairwise order of rank.
///
/// Ranks post the addresses of their buffers, and the elements too if they are few. By what all have posted they
/// choose:
///   one-shot:    every rank reads the elements of all ranks and reduces them itself;
///   single copy: see SingleCopyReduction;
///   staged:      see StagedReduction.
class NodeReduction final : public Collective {
 public:
  NodeReduction(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args, std::shared_ptr<NodeGroup> group);

 protected:
  void post(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  bool holds_headers() const override { return true; }
  std::vector<int> pending_peers() override;
  void abort() override;

 private:
  bool prestages();
  void gather();
  void reduce_one_shot();
  bool finish_one_shot();

  using Path = PathTuner::Path;

  std::shared_ptr<NodeGroup> group_;
  ReductionContext context_;
  std::vector<HeaderExchange::Bytes> elements_;  // by rank
  std::optional<SingleCopyReduction> single_copy_;
  std::optional<StagedReduction> staged_;
  Path path_ = Path::copy_in_copy_out;
  bool timed_ = false;
  std::vector<std::byte> result_;  // of one-shot, until others have read this rank's buffer
};

}  // namespace samestep
