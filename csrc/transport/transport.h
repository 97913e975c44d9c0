#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "communicator/communicator.h"
#include "transport/departure.h"
#include "waiting/backoff.h"

namespace samestep {

class PeerWatch;

/// Moves tagged byte messages between the ranks of a group. ExchangeCommunicator builds every collective on it.
///
/// Messages with the same sender and tag arrive in the order in which they were sent. Only `subset` and `close` block.
/// Not thread-safe: the owner calls one function at a time, unless stated otherwise.
///
/// A call throws Error when the transport reports a failure. The exception is a peer whose failure `failed_peers` is
/// about to report: requests with it may never complete.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view name() const = 0;

  /// A send or receive in flight; inactive once `test` has returned true.
  struct Request {
    std::uintptr_t bits = 0;
    bool active = false;
  };

  struct Envelope {
    int source = -1;
    int tag = -1;
  };

  /// `data` must not change until the request has completed.
  virtual Request send(const void* data, std::size_t nbytes, int dest, int tag) = 0;

  /// Receives one message of at most `capacity` bytes; `source` may be kAnySource.
  virtual Request receive(void* data, std::size_t capacity, int source, int tag) = 0;

  /// True once the request has completed, and for an inactive one. Stores the sender and tag of a received message in
  /// `envelope`, if given.
  virtual bool test(Request& request, Envelope* envelope = nullptr) = 0;

  /// Number of messages of RequestSets that have completed so far. Thread-safe. Waiting threads read it only to notice
  /// progress, so relaxed order is enough.
  std::uint64_t ended() const { return ended_.load(std::memory_order_relaxed); }
  void count_ended() { ended_.fetch_add(1, std::memory_order_relaxed); }

  /// Cancels a receive. False if a message has already matched it: then `test` it until it completes, unless
  /// `holds_memory` says that the transport has done with it what it could.
  virtual bool cancel(Request& request) = 0;

  /// From now on the memory of sends that have not completed may change, because their operations have failed. It is
  /// still read: what arrives may be anything, but is no error of the transport.
  virtual void detach_sends() {}

  /// Whether a message with this tag has arrived, from any rank, that no receive has matched.
  virtual bool probe(int tag, Envelope& envelope) = 0;
  /// Receives such a message of `nbytes`. False if none has arrived.
  bool take_arrived(int tag, void* data, std::size_t nbytes, Envelope& from) {
    if (!probe(tag, from)) return false;
    Request request = receive(data, nbytes, from.source, tag);
    while (!test(request)) {  // which ends soon, because the message is here
    }
    return true;
  }

  /// Largest message, in bytes.
  virtual std::size_t max_message() const = 0;
  /// Lowers that limit, if the transport has one. All ranks must pass the same value.
  virtual void set_max_message(std::size_t nbytes) { (void)nbytes; }

  /// Up to this size a copy into a larger message costs less than a message of its own.
  virtual std::size_t eager_limit() const { return 4 << 10; }
  /// Whether to copy header and data into one message. `data`: the beginning of the data.
  virtual bool is_eager(const void* data, std::size_t nbytes) const {
    (void)data;
    return nbytes <= eager_limit();
  }

  /// A number for the next group of this rank, for transports that distinguish groups by numbers; its members use the
  /// highest of their numbers. 0: none is needed.
  virtual std::uint32_t reserve_group_id() { return 0; }
  /// The transport of the group of `ranks`, in that order, which have agreed on `number`. Collective over those ranks,
  /// which have agreed to call it; may block until all have.
  virtual std::unique_ptr<Transport> subset(std::span<const int> ranks, std::uint32_t number) = 0;

  /// Sleeps until something may have arrived or been sent, for at most a millisecond. Thread-safe. False if the
  /// transport cannot wake a sleeping thread.
  virtual bool wait_for_activity() { return false; }
  /// The same for ranks that share memory, which sleep only if it costs less than yielding; see Backoff. Null if
  /// nothing can wake them.
  virtual std::unique_ptr<Waiter> make_waiter() { return nullptr; }

  /// Watches the processes of the peers, for a transport that does not notice by itself that one has died.
  virtual void set_watch(std::shared_ptr<PeerWatch> watch) { (void)watch; }

  /// Checks whether a peer is alive; if it is not, `failed_peers` reports it later.
  virtual void ping(int peer) { (void)peer; }

  /// A rank that has left the group.
  struct PeerFailure {
    int peer;
    std::uint64_t first_absent;         ///< the first collective in which it may not take part
    std::string text;                   ///< how that was detected
    std::optional<Departure> why = {};  ///< its own report, if it sent one
  };
  /// Ranks that were found to have left since the last call.
  virtual std::vector<PeerFailure> failed_peers() { return {}; }

  /// Whether a peer has closed the group, or cannot be reached. `failed_peers` does not report the former.
  virtual bool has_closed(int peer) {
    (void)peer;
    return false;
  }

  /// Frees the resources of the group. Collective, unlike the destructor, which may be called without it.
  virtual void close() = 0;
  /// The same once all other ranks have left the group or ended: waits for none of them.
  virtual void close_last() { close(); }
  /// Whether the memory of a receive that could not be cancelled may still be written, for as long as the process
  /// lives.
  virtual bool holds_memory() const { return false; }
  /// Whether, after `close` on all ranks, the memory of requests that have not ended is never accessed again.
  virtual bool forgets_at_close() const { return false; }

 private:
  std::atomic<std::uint64_t> ended_ = 0;
};

}  // namespace samestep
