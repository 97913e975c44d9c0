#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace samestep {

/// How every collective begins: each rank tells all others what it is about to do, with the data behind it
/// where they are few. Small operations end here.
///
/// Operations meet in order of their sequence numbers, 0, 1, 2, ...
class Meeting {
 public:
  struct Header {
    std::uint64_t digest;    ///< of the sender's Signature
    std::uint32_t sequence;  ///< modulo 2^32
    std::uint32_t nbytes;    ///< of data behind the header
  };
  using Bytes = std::span<const std::byte>;

  virtual ~Meeting() = default;

  /// Most bytes of data behind a header, prefix included, where all ranks get the same and where each gets its own; 0
  /// where nothing can go to one rank alone.
  virtual std::size_t limit() const = 0;
  virtual std::size_t limit_of_parts() const = 0;
  /// The same where one rank alone has any.
  virtual std::size_t limit_of_one() const { return limit(); }

  /// May the operation be announced now? Operations are announced in order.
  virtual bool has_room(std::uint64_t sequence) = 0;

  /// Tells all other ranks, with `prefix` and `data` behind the header.
  virtual void announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix = {}) = 0;
  /// The same with data of its own for each rank: `parts` by rank, this rank's entry is ignored.
  virtual void announce_parts(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                              Bytes prefix = {}) = 0;

  /// True once all ranks have announced this operation. False too while earlier operations still hold the
  /// room where it would be.
  virtual bool complete(std::uint64_t sequence) = 0;

  /// After `complete`, until `release`: what a peer announced for this rank.
  virtual Header header(std::uint64_t sequence, int peer) const = 0;
  virtual Bytes data(std::uint64_t sequence, int peer) const = 0;

  /// The operation needs no longer what was announced. In order of sequence.
  virtual void release(std::uint64_t sequence) = 0;

  /// Ranks that have not announced this operation.
  virtual std::vector<int> missing(std::uint64_t sequence) = 0;

  /// This rank has waited for long for others to announce it. They may want to know that it has.
  virtual void wait_is_long(std::uint64_t sequence) { (void)sequence; }

  /// Gives up what is under way.
  virtual void abandon() = 0;

  /// This rank takes no part in operations from `first_missing` on, although it may have announced some.
  virtual void leave(std::uint64_t first_missing, const std::string& reason) { (void)first_missing, (void)reason; }

  std::uint64_t messages_sent() const { return messages_sent_; }
  std::uint64_t bytes_sent() const { return bytes_sent_; }

 protected:
  void count(std::uint64_t messages, std::size_t nbytes) {
    messages_sent_ += messages;
    bytes_sent_ += messages * nbytes;
  }

 private:
  std::uint64_t messages_sent_ = 0;
  std::uint64_t bytes_sent_ = 0;
};

}  // namespace samestep
