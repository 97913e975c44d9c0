#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hierarchy/topology.h"
#include "shm/local_peers.h"
#include "shm/write_fence.h"
#include "transport/group_numbers.h"

namespace samestep {

/// What the operations of a group over several hosts share.
struct HierarchicalGroup {
  HierarchicalGroup(Topology all_locations, int rank_of_group, std::uint64_t number)
      : topology(std::move(all_locations)), rank(rank_of_group), numbers(number) {}

  Topology topology;
  int rank;
  GroupNumbers numbers;                 ///< of the groups made from this one
  std::shared_ptr<LocalPeers> peers;    ///< null if this rank is alone on its host
  std::shared_ptr<WriteFence> fence;    ///< null if this rank is alone on its host
  std::vector<std::byte> bounce = {};   ///< scratch memory for elements read from other ranks
  std::vector<std::byte> partial = {};  ///< scratch memory for a step's sum over the ranks of this host

  int own_host() const { return topology.host_of(rank); }
  std::span<const int> local_ranks() const { return topology.ranks_on(own_host()); }
};

}  // namespace samestep
