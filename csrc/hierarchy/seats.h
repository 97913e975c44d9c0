#pragma once

#include <span>
#include <vector>

namespace samestep {

/// Where a rank runs.
struct Seat {
  int host;     ///< number of its host
  int on_host;  ///< its rank among all ranks of that host, see Host::rank
};

/// The ranks of a group by host. Hosts are numbered anew, in the order of their first ranks. Pure.
class Seats {
 public:
  /// `seats`: by rank of the group, at least one.
  explicit Seats(std::vector<Seat> seats);

  int n_hosts() const { return static_cast<int>(ranks_.size()); }
  int host_of(int rank) const { return host_of_[index(rank)]; }
  const Seat& seat(int rank) const { return seats_[index(rank)]; }
  /// Ranks of a host, ascending.
  std::span<const int> ranks_on(int host) const { return ranks_[index(host)]; }
  /// The number of a rank among those of its host.
  int place_of(int rank) const { return place_of_[index(rank)]; }

  /// Lane i consists of the i-th rank of every host; as many as the smallest host has ranks.
  int lanes() const { return lanes_; }

  /// Does a sum over the ranks of each host, and then over hosts, add up in pairwise order of rank? True where each
  /// host has the same power of two of consecutive ranks.
  bool keeps_order() const { return keeps_order_; }

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }

  std::vector<Seat> seats_;
  std::vector<int> host_of_, place_of_;
  std::vector<std::vector<int>> ranks_;
  int lanes_ = 0;
  bool keeps_order_ = false;
};

}  // namespace samestep
