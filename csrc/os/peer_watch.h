#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"

namespace samestep {

/// Whether other processes still live, asked over TCP and answered by the kernels of their hosts.
///
/// Each process listens at a port and never takes a connection there. As long as it lives, its kernel lets others
/// connect, whatever the process does: computing, stopped or stuck. When it ends, the kernel ends the connections and
/// refuses new ones; when its host is gone, nothing answers. So nothing has to run in the process that is asked after,
/// and nothing is sent until somebody asks.
///
/// All calls are quick and may come from several threads. A process made by fork keeps no port and no connection.
class PeerWatch {
 public:
  struct Place {
    std::string address;  ///< IPv4 or IPv6, in digits
    std::uint16_t port = 0;
    std::string where;  ///< for texts, such as "node1 (10.0.0.7:41021)"
  };

  /// `listener`: of this process. `places`: by number of the process, with this one's own.
  /// Throws InvalidArgumentError for what is no address.
  PeerWatch(Fd listener, const std::vector<Place>& places);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// Begins to watch a process. One that is being watched already goes on being so.
  void ask_after(std::size_t number);

  /// How it is known that the process has died; empty while it lives or is not watched. A death is told half a second
  /// after it was seen, for its last words may still be on the way.
  std::string death(std::size_t number);

 private:
  struct Peer;

  void connect(Peer& peer);
  void look();
  void look_at(Peer& peer);
  void conclude(Peer& peer, int error);

  Fd listener_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  Clock::time_point looked_{};
};

}  // namespace samestep
