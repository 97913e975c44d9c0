#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"

namespace samestep {

/// Detects the death of processes of other hosts by TCP probes that the kernels of those hosts answer.
///
/// Each process listens at a port and never accepts a connection there. It also reserves a second port, where it does
/// not listen. The process that is probed does nothing, whether it computes, is stopped or hangs:
///
///   its first port     its second port    meaning
///   accepts            -                  it is alive
///   no answer          refuses            it is alive: its host answers, and the queue of the listening port is full
///   refuses, 3 times   refuses            it has ended: its kernel has closed the port
///   no answer          no answer          its host is down or cannot be reached
///
/// A connection that is reset or closed is no evidence: the first port is asked again. So neither strangers who
/// connect, nor more watching ranks than the queue holds, make a process appear dead; with `tcp_abort_on_overflow` a
/// full queue resets connections that it had accepted, but does not refuse any.
///
/// All calls are quick and may come from several threads. A process made by fork keeps no port and no connection.
class PeerWatch {
 public:
  struct Place {
    std::string address;              ///< IPv4 or IPv6, in digits
    std::uint16_t port = 0;           ///< at which the process listens
    std::uint16_t reserved_port = 0;  ///< at which it does not
    std::string where;                ///< for texts, such as "node1 (10.0.0.7:41021)"
  };
  struct Times {
    Seconds silence{7};         ///< without any answer from a host until it counts as down
    Seconds retry{1};           ///< between probes that get no answer: a packet may be lost
    Seconds report_delay{0.5};  ///< between a death and its report: what the peer sent before may still be in flight
  };

  /// `listener`, `reserved`: sockets of this process at its two ports. `places`: the ports of all processes, including
  /// this one, by process number. Throws InvalidArgumentError if a place has no valid address.
  PeerWatch(Fd listener, Fd reserved, const std::vector<Place>& places, const Times& times);
  PeerWatch(Fd listener, Fd reserved, const std::vector<Place>& places)
      : PeerWatch(std::move(listener), std::move(reserved), places, Times{}) {}
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// Starts to watch a process, unless it is already watched.
  void watch(std::size_t number);

  /// The evidence for the death of the process; empty while it is alive or not watched.
  std::string death(std::size_t number);

 private:
  struct Peer;

  void check_all();
  void check(Peer& peer);
  void check_process(Peer& peer);
  void check_host(Peer& peer);
  void conclude(Peer& peer, std::string why);

  const Times times_;
  Fd listener_;
  Fd reserved_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  Clock::time_point last_check_{};
};

}  // namespace samestep
