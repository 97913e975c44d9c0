#pragma once

#include <cstddef>
#include <span>

#include "communicator/collective_args.h"

namespace samestep {

/// What this rank sends to one rank and receives from it. The entry of this rank itself is a local copy.
struct PeerTransfer {
  const std::byte* out = nullptr;
  std::size_t out_nbytes = 0;
  std::byte* in = nullptr;
  std::size_t in_nbytes = 0;
};

/// Expresses a collective that only moves data as transfers of `rank`, one entry for each rank of the group. The
/// entries must be empty.
void plan_transfers(const CollectiveArgs& args, int rank, std::span<PeerTransfer> transfers);

}  // namespace samestep
