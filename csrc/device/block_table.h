#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/peer_transfer.h"
#include "communicator/communicator.h"

namespace samestep {

/// What each rank sends to each, for a `v` form where a rank knows only its own blocks.
class BlockTable {
 public:
  explicit BlockTable(std::span<const PeerTransfer> own);

  /// Exchanges the tables of all ranks. `as`: the call that this is a step of. The table must outlive the operation.
  std::shared_ptr<Work> exchange(Communicator& group, const Signature& as);
  /// In elements of `item` bytes. Throws a MismatchError, the same on all ranks, if a rank expects more or fewer than
  /// it is sent.
  BlockLengths lengths(std::string_view verb, std::string_view group, std::size_t item) const;

 private:
  std::uint64_t sends(std::size_t rank, std::size_t to) const { return all_[rank * own_.size() + to]; }
  std::uint64_t expects(std::size_t rank, std::size_t from) const { return all_[rank * own_.size() + n_ranks_ + from]; }

  std::size_t n_ranks_;
  std::vector<std::uint64_t> own_;  // bytes sent to each rank, then bytes expected from each
  std::vector<std::uint64_t> all_;  // of all ranks
};

}  // namespace samestep
