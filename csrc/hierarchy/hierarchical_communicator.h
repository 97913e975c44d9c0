#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "collectives/exchange_communicator.h"
#include "hierarchy/hierarchical_group.h"
#include "node/node_peer_memory.h"

namespace samestep {

/// The ranks of several hosts, at two levels. Operations start, compare signatures and fail as over the transport
/// alone; long collectives access the memory of the ranks of their host, and send each byte between two hosts once
/// (HierarchicalCollective). A group whose ranks share one host is a NodeCommunicator.
///
/// Sums are in pairwise order of rank if all hosts have the same power of two of consecutive ranks, else in pairwise
/// order within each host and then over hosts.
class HierarchicalCommunicator final : public ExchangeCommunicator {
 public:
  /// `topology`: by rank. `host`: the peers of this rank; null if it is alone on its host. `number`: see GroupNumbers.
  /// `engine`: operations over the transport alone may use it already. Collective over each host.
  static std::shared_ptr<HierarchicalCommunicator> over(std::shared_ptr<ProgressEngine> engine,
                                                        std::vector<RankLocation> topology,
                                                        std::shared_ptr<LocalPeers> host, const Deadline& deadline,
                                                        std::uint64_t number = GroupNumbers::kWorld);

  HierarchicalCommunicator(std::shared_ptr<ProgressEngine> engine, std::shared_ptr<HierarchicalGroup> group)
      : ExchangeCommunicator(std::move(engine), "hierarchical"), group_(std::move(group)) {
    if (group_->peers) memory_.emplace(group_->peers, std::vector<int>{}, group_->fence);
  }

  PeerMemory* peer_memory() override { return memory_ ? &*memory_ : nullptr; }

 protected:
  WorkPtr start_collective(const CollectiveArgs& args) override;
  WorkPtr start_reduction(const CollectiveArgs& args) override;
  WorkPtr start_long_bcast(const CollectiveArgs& args) override;
  std::shared_ptr<Communicator> make_child(std::span<const int> ranks, ExchangeOptions options,
                                           const Deadline& deadline) override;

 private:
  std::shared_ptr<HierarchicalGroup> group_;
  std::optional<NodePeerMemory> memory_;
};

/// Makes a HierarchicalCommunicator of the same ranks. `hosts`: by rank, the number of its host. `host`: see
/// HierarchicalCommunicator::over. The two are one group: closing either closes both. Collective; sends no messages.
std::shared_ptr<Communicator> open_hierarchical(ExchangeCommunicator& flat, const std::vector<int>& hosts,
                                                std::shared_ptr<LocalPeers> host, const Deadline& deadline);

}  // namespace samestep
