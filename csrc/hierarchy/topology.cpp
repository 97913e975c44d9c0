#include "hierarchy/topology.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

namespace samestep {

Topology::Topology(std::vector<RankLocation> topology) : locations_(std::move(topology)) {
  std::map<int, int> numbers;
  for (std::size_t rank = 0; rank < locations_.size(); ++rank) {
    // In the order of first ranks, so that hosts are numbered equally on all ranks, and sums over hosts have the order
    // of ranks if hosts hold consecutive ones.
    const auto [at, is_new] = numbers.try_emplace(locations_[rank].host, n_hosts());
    if (is_new) ranks_.emplace_back();
    std::vector<int>& ranks = ranks_[index(at->second)];
    host_of_.push_back(at->second);
    local_index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
  const auto by_size = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto [least, most] = std::minmax_element(ranks_.begin(), ranks_.end(), by_size);
  lanes_ = static_cast<int>(least->size());
  keeps_order_ = least->size() == most->size() && std::has_single_bit(least->size()) &&
                 std::is_sorted(host_of_.begin(), host_of_.end());
}

}  // namespace samestep
