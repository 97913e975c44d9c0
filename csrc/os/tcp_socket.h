#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string>

#include "core/deadline.h"
#include "os/fd.h"

namespace samestep {

/// A connected TCP socket that never blocks.
///
/// The kernel closes the connection when the host of an idle peer has been silent for `patience`; see `silent` for a
/// peer that data are in flight to. A forked process does not keep the connection open.
class TcpSocket {
 public:
  /// How long another host may be silent, at least 2 s; of sockets made from now on, and of all for `silent`.
  static void set_patience(Seconds patience);
  static Seconds patience();

  /// Takes a connected socket and sets its options. Throws UnavailableError if it is not connected.
  explicit TcpSocket(Fd fd);
  TcpSocket(TcpSocket&&) noexcept = default;
  TcpSocket& operator=(TcpSocket&&) noexcept = default;
  ~TcpSocket() { close(); }

  /// The result of a read or write.
  struct Outcome {
    enum class Kind { moved, later, ended } kind;
    std::size_t nbytes = 0;  ///< moved, at least 1
    std::string why = {};    ///< it has ended
  };
  Outcome read(std::span<const iovec> parts);
  Outcome write(std::span<const iovec> parts);

  /// Whether the peer's host has left data unacknowledged for `patience`. The host of a process that does not read
  /// still acknowledges.
  bool silent() const;

  /// Whether the peer's host has acknowledged anything, including keepalive probes, within the last `span`.
  bool acknowledged_within(Seconds span) const;

  /// The other side reads what has been written, and then that there is no more.
  void end_sending();
  void close();
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
};

}  // namespace samestep
