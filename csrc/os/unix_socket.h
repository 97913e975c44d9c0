#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"

namespace samestep {

/// A connection between two processes of one host that transfers packets and descriptors (SCM_RIGHTS).
class UnixSocket {
 public:
  UnixSocket() = default;
  explicit UnixSocket(Fd fd) : fd_(std::move(fd)) {}

  struct Packet {
    std::vector<std::byte> bytes;
    Fd fd;  ///< none if no descriptor came with it
  };

  /// False if the other process has left so much unread that the kernel takes no more. Throws PeerLostError if it is
  /// gone.
  bool send_now(const void* data, std::size_t nbytes, const Fd* fd = nullptr) const;
  /// The same with a wait for that process; false at the deadline.
  bool send(const void* data, std::size_t nbytes, const Fd* fd, const Deadline& deadline) const;
  /// The next packet of at most 4 KiB; nothing if none has arrived. Throws PeerLostError at the end of the connection,
  /// and UnavailableError if this process has no descriptor left for the one that came with the packet.
  std::optional<Packet> receive_now();
  /// For at most 20 ms. Runs the wait hooks.
  void wait_until_readable() const;

  /// The process at the other end, or 0 if it is in another PID namespace.
  pid_t peer() const;
  bool at_end() const;
  const Fd& fd() const { return fd_; }

 private:
  void wait_for(short events) const;

  Fd fd_;
};

}  // namespace samestep
