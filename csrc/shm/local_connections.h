#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "os/unix_socket.h"

namespace samestep {

/// An allgather of bytes over the ranks of a host, by the means of their launcher.
using Exchange = std::function<std::vector<std::string>(const std::string&)>;

/// A rank's connection to another rank of its host.
struct LocalPeer {
  UnixSocket socket;   ///< invalid for this rank itself
  std::uint64_t word;  ///< that the other rank passed
};

/// Connects all pairs of ranks of a host. Collective.
///
/// The names of the sockets are not secret: every process of the host may connect. So both ends check the other's user
/// (SO_PEERCRED), and the connecting rank sends a random token that only the ranks know. Other connections are closed,
/// with any descriptors that they have sent; they do not delay the ranks, even if they are many and send nothing.
///
/// Throws TimeoutError at the deadline, and UnavailableError if a process of another user listens at a rank's name.
std::vector<LocalPeer> connect_local_peers(int rank, int size, std::uint64_t word, const Exchange& exchange,
                                           const Deadline& deadline);

}  // namespace samestep
