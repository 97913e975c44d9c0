#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include "core/buffer.h"
#include "core/deadline.h"

namespace samestep {

/// The source of a message; ranks are those of the group.
struct Status {
  int source = -1;
  int tag = -1;
  std::uint64_t count = 0;  ///< elements received
};

/// A pending operation. Made by a Communicator; the thread that polls or waits makes progress.
///
/// The buffers must stay alive until `done()` is true, also after `wait` has thrown TimeoutError: the operation may
/// still be pending.
class Work {
 public:
  virtual ~Work() = default;

  /// Makes progress. True once the operation has ended, with or without an error. Never blocks. Throws only
  /// NotInitializedError, in a process that was forked from the rank.
  virtual bool done() = 0;

  /// Whether `done` may call the runtime of a device, and block in it.
  virtual bool asks_device() const { return false; }

  /// Of an operation on device memory: whether its end is known already. Asks nobody.
  virtual bool has_ended() const { return false; }

  /// Blocks until the operation has ended, or until `deadline`. Rethrows its error. After the deadline throws a
  /// TimeoutError that names the operation, its sequence number and the ranks that did and did not arrive. May be
  /// called again.
  virtual void wait(const Deadline& deadline) = 0;

  /// For operations on device memory: later work in `stream` runs after the operation, so that the caller need not
  /// wait. Blocks only for the part of the operation that runs on the host, until `deadline`; throws as `wait` does.
  /// False if there is no device: then call `wait`.
  virtual bool make_stream_wait(StreamHandle stream, const Deadline& deadline) {
    (void)stream, (void)deadline;
    return false;
  }

  /// Of a receive into device memory, which matches messages at once but writes nothing before this call: the device
  /// has done what comes before. Thread-safe.
  virtual void begin_writes() {}

  /// Cancels a receive that no message has matched. False for other operations, and if a message has matched: then
  /// wait.
  virtual bool cancel() { return false; }

  /// Cancels a receive that a message may have matched or ended: the next receive that matches gets the message, once
  /// it has arrived. Its elements are then undefined, and its result must not be used. False for other operations.
  virtual bool give_back() { return cancel(); }

  /// The error of the operation, or null. Valid once `done()` is true.
  virtual std::exception_ptr error() const = 0;

  /// Of a pending operation: the ranks it has waited for, for the text of a TimeoutError. Empty if that is not known.
  /// Never blocks.
  virtual std::string timeout_message(Seconds waited) {
    (void)waited;
    return "";
  }

  /// Whether no device uses the memory of this operation any more. False for what is not known to have ended.
  virtual bool device_has_ended() const { return false; }

  /// Of a completed receive: the sender and tag. Otherwise all -1.
  virtual Status status() const { return {}; }

  /// Of a completed receive of an object: its bytes, which this Work owns.
  virtual std::span<const std::byte> object() const { return {}; }
};

}  // namespace samestep
