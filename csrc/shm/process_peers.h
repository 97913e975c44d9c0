#pragma once

#include <memory>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "shm/local_peers.h"

namespace samestep {

/// The ranks of a host, which are processes. `links`: by rank, a connected Unix socket that keeps the borders of
/// packets; invalid for this rank itself. Collective. Throws TimeoutError at the deadline, and PeerLostError if a
/// process has ended.
std::shared_ptr<LocalPeers> open_process_peers(int rank, std::vector<Fd> links, const Deadline& deadline);

}  // namespace samestep
