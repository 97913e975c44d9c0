#pragma once

#include <memory>

#include "shm/local_connections.h"
#include "shm/local_peers.h"

namespace samestep {

/// Connects the ranks of a host, which are processes. Collective. Throws TimeoutError at the deadline, and
/// UnavailableError if the processes cannot share memory.
std::shared_ptr<LocalPeers> open_process_peers(int rank, int size, const Exchange& exchange, const Deadline& deadline);

}  // namespace samestep
