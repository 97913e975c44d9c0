#pragma once

#include <cstdint>
#include <memory>

#include "communicator/collective_args.h"
#include "engine/operation.h"
#include "node/node_group.h"

namespace samestep {

/// A collective of few bytes among the ranks of one host: every rank posts its elements behind its header, and each
/// rank takes what it needs from the headers of the others.
///
/// The protocol is written once, in the static functions. A blocking call runs them outside the queue of operations
/// (the fast path, NodeCommunicator::run_collective); the operation in the queue calls the same ones. So each rank may
/// run the collective on both paths.
class InlineCollective final : public Collective {
 public:
  InlineCollective(std::shared_ptr<ProgressEngine> engine, const CollectiveArgs& args, std::shared_ptr<NodeGroup> group)
      : Collective(std::move(engine), args.signature()), args_(args), group_(std::move(group)) {}

  /// Whether the collective runs on this path. The same on all ranks whose arguments agree.
  static bool fits(ProgressEngine& engine, const CollectiveArgs& args);
  /// Whether ranks post a ReductionDescriptor, too: then some may post no elements, and NodeReduction is the operation.
  /// It has the factors.
  static bool posts_descriptor(const CollectiveArgs& args) {
    return args.type == CollectiveType::allreduce &&
           (args.in.nbytes() >= Thresholds::kDescriptorMin || multiplies(args.reduction.op));
  }
  static void post(ProgressEngine& engine, NodeGroup& group, std::uint64_t sequence, std::uint64_t digest,
                   const CollectiveArgs& args);
  /// To be called when all ranks have posted it and agree: stores this rank's result. False if a rank posted a
  /// descriptor without its elements.
  static bool finish(ProgressEngine& engine, std::uint64_t sequence, const CollectiveArgs& args);

 protected:
  void post(std::uint64_t digest) override { post(engine(), *group_, sequence_, digest, args_); }
  void start_work() override { finish(engine(), sequence_, args_); }
  bool work() override { return true; }

 private:
  CollectiveArgs args_;
  std::shared_ptr<NodeGroup> group_;
};

}  // namespace samestep
