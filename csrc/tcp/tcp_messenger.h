#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "exchange/engine.h"
#include "exchange/messenger.h"
#include "os/fd.h"

namespace samestep {

/// What a rank has of another: a connection, and how texts name its other end.
struct TcpPeer {
  Fd fd;              ///< a connected socket; none for this rank itself
  std::string where;  ///< such as "node1 (10.0.0.7:41021)"
};

/// Moves messages over one connection for each pair of ranks; groups made from it use the same ones.
///
/// `peers`: by rank. Whoever is at the other end is trusted: the connections are made by ranks that have proved
/// themselves to each other. Throws UnavailableError if one is no socket.
std::unique_ptr<Messenger> make_tcp_messenger(int rank, std::vector<TcpPeer> peers);

/// The world over such a messenger. Not collective, for all connections are there.
std::shared_ptr<Communicator> open_tcp_world(int rank, std::vector<TcpPeer> peers, const ExchangeOptions& options);

}  // namespace samestep
