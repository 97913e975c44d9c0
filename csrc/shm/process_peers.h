#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "shm/local_peers.h"

namespace samestep {

/// Where this process has a word that its peers read, and write back, to find out whether they can.
std::uint64_t probe_address();

/// The ranks of a host, which are processes. `links`: by rank, a connected Unix socket that keeps the borders of
/// packets; invalid for this rank itself. `probes`: the `probe_address` of each. Collective. Throws TimeoutError at the
/// deadline, and PeerLostError if a process has ended.
std::shared_ptr<LocalPeers> open_process_peers(int rank, std::vector<Fd> links,
                                               const std::vector<std::uint64_t>& probes, const Deadline& deadline);

}  // namespace samestep
