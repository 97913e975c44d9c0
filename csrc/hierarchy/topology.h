#pragma once

#include <span>
#include <vector>

namespace samestep {

/// The location of a rank.
struct RankLocation {
  int host;        ///< number of its host
  int local_rank;  ///< its rank among all ranks of that host, see LocalPeers::rank
};

/// The ranks of a group by host. Hosts are renumbered in the order of their first ranks. Pure.
class Topology {
 public:
  /// `topology`: by rank of the group, at least one.
  explicit Topology(std::vector<RankLocation> topology);

  int n_hosts() const { return static_cast<int>(ranks_.size()); }
  int host_of(int rank) const { return host_of_[index(rank)]; }
  const RankLocation& location(int rank) const { return locations_[index(rank)]; }
  /// The ranks of a host, ascending.
  std::span<const int> ranks_on(int host) const { return ranks_[index(host)]; }
  /// The index of a rank among those of its host.
  int local_index(int rank) const { return local_index_[index(rank)]; }

  /// Lane i consists of the i-th rank of every host; there are as many as the smallest host has ranks.
  int lanes() const { return lanes_; }

  /// Whether sums over the ranks of each host and then over hosts are in pairwise order of rank: true if all hosts have
  /// the same power of two of consecutive ranks.
  bool keeps_order() const { return keeps_order_; }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }

  std::vector<RankLocation> locations_;
  std::vector<int> host_of_, local_index_;
  std::vector<std::vector<int>> ranks_;
  int lanes_ = 0;
  bool keeps_order_ = false;
};

}  // namespace samestep
