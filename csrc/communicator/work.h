#pragma once

#include <cstdint>
#include <exception>

#include "core/buffer.h"
#include "core/deadline.h"

namespace samestep {

/// Where a message came from; ranks are those of the group.
struct Status {
  int source = -1;
  int tag = -1;
  std::uint64_t count = 0;  ///< elements received
};

/// One operation under way. Made by a Communicator, finished by whoever polls or waits.
///
/// The buffers given to the verb must stay alive until `done()` is true, also when `wait` has
/// thrown TimeoutError: the operation may still be under way.
class Work {
 public:
  virtual ~Work() = default;

  /// Makes progress; true when the operation has ended, well or not. Never blocks. Throws only NotInitializedError, in
  /// a process that was forked from the rank.
  virtual bool done() = 0;

  /// Blocks until the end, or until `deadline`. Rethrows what went wrong; the deadline passing is a
  /// TimeoutError that names the operation, its sequence number and the ranks that did and did not
  /// arrive. May be called again.
  virtual void wait(const Deadline& deadline) = 0;

  /// Operations on device memory: what is put into `stream` from now on comes after the operation, and the caller need
  /// not wait for it. Blocks only as far as the host has a part in it, until `deadline`; throws as `wait` does. False
  /// where there is no device: then `wait`.
  virtual bool order_before(StreamHandle stream, const Deadline& deadline) {
    (void)stream, (void)deadline;
    return false;
  }

  /// What went wrong, or null. Meaningful once `done()`.
  virtual std::exception_ptr error() const = 0;

  /// For `recv`, once done: who sent the message. Elsewhere all -1.
  virtual Status status() const { return {}; }
};

}  // namespace samestep
