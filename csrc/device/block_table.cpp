#include "device/block_table.h"

#include <algorithm>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

BlockTable::BlockTable(std::span<const PeerTransfer> own) : n_ranks_(own.size()) {
  for (const PeerTransfer& transfer : own) own_.push_back(transfer.out_nbytes);
  for (const PeerTransfer& transfer : own) own_.push_back(transfer.in_nbytes);
  all_.resize(n_ranks_ * own_.size());
}

std::shared_ptr<Work> BlockTable::exchange(Communicator& group, const Signature& as) {
  return group.start({.type = CollectiveType::allgather,
                      .in = {own_.data(), own_.size(), DType::uint64},
                      .out = {all_.data(), all_.size(), DType::uint64},
                      .compared_as = as});
}

BlockLengths BlockTable::lengths(std::string_view verb, std::string_view group, std::size_t item) const {
  BlockLengths found{};
  for (std::size_t i = 0; i < n_ranks_; ++i) {
    std::uint64_t sent = 0, received = 0;
    for (std::size_t j = 0; j < n_ranks_; ++j) {
      const std::uint64_t n = sends(i, j) / item;
      if (const std::uint64_t expected = expects(j, i) / item; expected != n) {
        throw MismatchError(str(verb, " in group '", group, "': rank ", i, " sends ", n, " elements to rank ", j,
                                ", which expects ", expected));
      }
      found.longest = std::max(found.longest, n);
      sent += n;
      received += expects(i, j) / item;
    }
    found.busiest = std::max({found.busiest, sent, received});
  }
  return found;
}

}  // namespace samestep
