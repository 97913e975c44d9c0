#pragma once

#include <atomic>
#include <cstddef>
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
  GroupNumbers numbers;                    ///< of the groups made from this one
  std::shared_ptr<LocalPeers> peers;       ///< null if this rank is alone on its host
  std::shared_ptr<std::byte> leave_flags;  ///< shared by the ranks of the group on this host, see LeaveFlags
  std::shared_ptr<WriteFence> fence;       ///< null if this rank is alone on its host
  std::vector<std::byte> bounce = {};      ///< scratch memory for elements read from other ranks
  std::vector<std::byte> partial = {};     ///< scratch memory for a step's sum over the ranks of this host

  int own_host() const { return topology.host_of(rank); }
  std::span<const int> local_ranks() const { return topology.ranks_on(own_host()); }
};

/// Which ranks of a host have left the group: their memory must not be accessed any more. Each word has one writer.
class LeaveFlags {
 public:
  static std::size_t nbytes_for(std::size_t n_ranks) { return n_ranks * sizeof(Flag); }

  /// `memory`: initially zero; null for a rank that is alone. `index`: of this rank on its host.
  LeaveFlags(std::shared_ptr<std::byte> memory, std::size_t n_ranks, std::size_t index)
      : memory_(std::move(memory)), flags_(reinterpret_cast<Flag*>(memory_.get())), size_(n_ranks), index_(index) {}

  /// Records that this rank takes no part in operations from `first_absent` on.
  void leave(std::uint64_t first_absent) {
    if (flags_ == nullptr) return;
    // relaxed: only this rank writes it
    const std::uint64_t before = flags_[index_].left.load(std::memory_order_relaxed);
    if (before != 0 && before <= first_absent + 1) return;
    flags_[index_].left.store(first_absent + 1, std::memory_order_release);  // pairs with all_present
  }
  bool all_present(std::uint64_t sequence) const {
    for (std::size_t i = 0; flags_ != nullptr && i < size_; ++i) {
      const std::uint64_t left = flags_[i].left.load(std::memory_order_acquire);  // pairs with leave
      if (left != 0 && sequence + 1 >= left) return false;
    }
    return true;
  }

 private:
  struct alignas(64) Flag {
    std::atomic<std::uint64_t> left;  // the first operation without the rank, plus one; 0 if it has not left
  };

  std::shared_ptr<std::byte> memory_;
  Flag* flags_;
  std::size_t size_, index_;
};

}  // namespace samestep
