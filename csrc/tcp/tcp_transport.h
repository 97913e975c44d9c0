#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "engine/progress_engine.h"
#include "os/fd.h"
#include "transport/transport.h"

namespace samestep {

/// A connection to another rank, and the name of its other end for texts.
struct TcpPeer {
  Fd fd;              ///< a connected socket; invalid for this rank itself
  std::string where;  ///< such as "node1 (10.0.0.7:41021)"
  /// Of 32 bytes, fresh for each connection, to encrypt what is sent on it and decrypt what is received; or empty.
  std::string send_key = {}, receive_key = {};
};

/// A transport over one connection for each pair of ranks, which all groups share.
///
/// `peers`: by rank. The other ends are trusted: ranks have authenticated each other when they connected. Throws
/// UnavailableError if a descriptor is not a socket, or if there are keys and no library to encrypt with.
std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<TcpPeer> peers);

/// The world over such a transport. Not collective, because all connections exist.
std::shared_ptr<Communicator> open_tcp_world(int rank, std::vector<TcpPeer> peers, const ExchangeOptions& options);

}  // namespace samestep
