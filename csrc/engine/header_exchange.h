#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/departure.h"

namespace samestep {

/// The first step of every collective: each rank sends all others a header with the digest of its call, followed by the
/// data if they are few. For small operations it is the only step.
///
/// Operations are matched by their sequence numbers 0, 1, 2, ...
class HeaderExchange {
 public:
  struct Header {
    std::uint64_t digest;    ///< of the sender's Signature
    std::uint32_t sequence;  ///< modulo 2^32
    std::uint32_t nbytes;    ///< of inline data
  };
  using Bytes = std::span<const std::byte>;

  /// The most bytes of data behind a header, prefix included.
  struct Limits {
    std::size_t to_all;         ///< of data that are the same for all ranks
    std::size_t per_peer;       ///< of data for each single peer; 0 if all ranks receive everything
    std::size_t single_source;  ///< of data that only one rank posts
  };
  explicit HeaderExchange(const Limits& limits) : limits_(limits) {}
  virtual ~HeaderExchange() = default;

  const Limits& limits() const { return limits_; }

  /// Whether the operation can be posted now. Operations are posted in order.
  virtual bool can_post(std::uint64_t sequence) = 0;

  /// Sends the header to all other ranks, followed by `prefix` and `data`.
  virtual void post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix = {}) = 0;
  /// The same with other data for each peer: `parts` by rank; this rank's entry is ignored.
  virtual void post_per_peer(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                             Bytes prefix = {}) = 0;

  /// True once all ranks have posted this operation. False also while earlier operations still occupy its buffers.
  virtual bool complete(std::uint64_t sequence) = 0;

  /// What a peer posted for this rank. Valid after `complete` and until `release`.
  virtual Header header(std::uint64_t sequence, int peer) const = 0;
  virtual Bytes data(std::uint64_t sequence, int peer) const = 0;

  /// Frees the headers and data of the operation. To be called in order of sequence.
  virtual void release(std::uint64_t sequence) = 0;

  /// Ranks that have not posted this operation.
  virtual std::vector<int> missing(std::uint64_t sequence) = 0;

  /// Called when this rank has waited long: lets others know that it has posted the operation.
  virtual void on_slow_wait(std::uint64_t sequence) { (void)sequence; }

  /// Cancels what is in flight.
  virtual void abandon() = 0;

  /// Records that this rank takes no part in operations from `first_absent` on, even if it has posted some.
  virtual void leave(std::uint64_t first_absent, const Departure& why) { (void)first_absent, (void)why; }

  std::uint64_t messages_sent() const { return messages_sent_; }
  std::uint64_t bytes_sent() const { return bytes_sent_; }

 protected:
  void count(std::uint64_t messages, std::size_t nbytes) {
    messages_sent_ += messages;
    bytes_sent_ += messages * nbytes;
  }

 private:
  const Limits limits_;
  std::uint64_t messages_sent_ = 0;
  std::uint64_t bytes_sent_ = 0;
};

}  // namespace samestep
