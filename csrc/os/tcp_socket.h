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
/// The kernel ends the connection when nothing has come for about 8 s from an idle peer's host; see `silent` for one
/// that data are on the way to. A process made by fork does not keep it open.
class TcpSocket {
 public:
  /// Takes a connected socket and sets its options. Throws UnavailableError if it is none.
  explicit TcpSocket(Fd fd);
  TcpSocket(TcpSocket&&) noexcept = default;
  TcpSocket& operator=(TcpSocket&&) noexcept = default;
  ~TcpSocket() { close(); }

  /// What came of a read or write.
  struct Outcome {
    enum class Kind { moved, later, ended } kind;
    std::size_t nbytes = 0;  ///< moved, at least 1
    std::string why = {};    ///< it has ended
  };
  Outcome read(std::span<const iovec> parts);
  Outcome write(std::span<const iovec> parts);

  /// Has the peer's host not answered for so long, although there was something to answer? A host whose process does
  /// not read, answers.
  bool silent(Seconds patience) const;

  void close();
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
};

}  // namespace samestep
