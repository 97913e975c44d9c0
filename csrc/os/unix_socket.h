#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
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

  /// Throws PeerLostError if the other end is gone.
  void send(const void* data, std::size_t nbytes, const Fd* fd = nullptr);
  /// The next packet of at most 4 KiB; nothing at the deadline. Throws PeerLostError at the end of the connection,
  /// Error if more than one descriptor came with the packet; all of those are closed.
  std::optional<Packet> receive(const Deadline& deadline);
  /// The same without waiting; nothing if no packet has arrived.
  std::optional<Packet> receive_now();

  /// The process at the other end, or 0 if it is in another PID namespace.
  pid_t peer() const;
  /// Whether it runs as this user, according to the kernel (SO_PEERCRED).
  bool is_same_user() const;
  bool at_end() const;
  const Fd& fd() const { return fd_; }

 private:
  Fd fd_;
};

/// Waits until one of these is readable, for at most 20 ms; runs the wait hooks.
void wait_until_readable(std::span<const int> fds);

/// Listens at an abstract name that the kernel picks, which disappears with the process. Every user of the host can
/// connect, so the peer's credentials are checked first.
class UnixListener {
 public:
  UnixListener();
  const std::string& name() const { return name_; }
  const Fd& fd() const { return fd_; }
  /// A pending connection, or nothing: none is pending, or this process has no descriptor left for it, which sets
  /// `no_descriptors`.
  std::optional<UnixSocket> accept_now(bool& no_descriptors);

 private:
  Fd fd_;
  std::string name_;
};

/// Connects, and waits while the listener's queue is full. Throws UnavailableError if no process listens, or one of
/// another user, and TimeoutError at the deadline.
UnixSocket connect_to(const std::string& name, const Deadline& deadline);

}  // namespace samestep
