#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"

namespace samestep {

/// A connection between two processes of one host that carries packets and, with them, descriptors.
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
  /// The next packet of at most 4 KiB; nothing at the deadline. Throws PeerLostError at the end of the connection.
  std::optional<Packet> receive(const Deadline& deadline);

  /// Process at the other end, 0 if it lives in another PID namespace.
  pid_t peer() const;
  bool at_end() const;
  const Fd& fd() const { return fd_; }

 private:
  Fd fd_;
};

/// Waits for connections under a name that the kernel picks; it is gone with the process.
class UnixListener {
 public:
  UnixListener();
  const std::string& name() const { return name_; }
  /// Nothing at the deadline.
  std::optional<UnixSocket> accept(const Deadline& deadline);

 private:
  Fd fd_;
  std::string name_;
};

UnixSocket connect_to(const std::string& name);

}  // namespace samestep
