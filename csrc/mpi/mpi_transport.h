#pragma once

#include <memory>

#include "collectives/exchange_communicator.h"
#include "communicator/communicator.h"
#include "core/deadline.h"
#include "mpi/mpi_library.h"
#include "os/peer_watch.h"

namespace samestep {

/// The ranks of MPI_COMM_WORLD, on a duplicate of it that returns errors, so that nothing an application
/// does with MPI meets what we do. Collective over the world. MPI must have been initialised.
///
/// Throws TimeoutError if not all ranks call it before the deadline.
std::shared_ptr<Communicator> open_mpi_world(std::shared_ptr<MpiLibrary> library, const ExchangeOptions& options,
                                             const Deadline& deadline);

/// Lets the groups of `world`, an MPI world or a group of one, know which ranks have died: MPI does not say. The
/// watch's numbers are the ranks of `world`.
void watch_ranks(ExchangeCommunicator& world, std::shared_ptr<PeerWatch> watch);

}  // namespace samestep
