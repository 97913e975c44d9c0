#pragma once

#include <memory>
#include <vector>

#include "engine/header_exchange.h"
#include "transport/transport.h"

namespace samestep {

/// A header exchange of one message to each other rank. Receives are posted ahead, so that a message is received
/// directly into its buffer.
class LinearHeaderExchange : public HeaderExchange {
 public:
  /// `max_inline`: bytes of data behind a header; 0: a default for the size of the group.
  LinearHeaderExchange(Transport& transport, std::size_t max_inline);

  /// Bounds unexpected messages: many more of them make MPICH 5.0.2 hang.
  bool can_post(std::uint64_t sequence) override { return sequence < released_ + kAhead; }
  void post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) override;
  void post_per_peer(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts, Bytes prefix) override;
  bool complete(std::uint64_t sequence) override;
  Header header(std::uint64_t sequence, int peer) const override;
  Bytes data(std::uint64_t sequence, int peer) const override;
  void release(std::uint64_t sequence) override;
  std::vector<int> missing(std::uint64_t sequence) override;
  void abandon() override;

 private:
  static constexpr std::uint64_t kAhead = 16;  // operations posted before the first of them is released
  static constexpr std::uint64_t kSlots = 2;   // operations whose messages are buffered at the same time

  struct Arrival {
    std::vector<std::byte> block;
    Transport::Request request;
  };
  struct Departure {
    std::vector<std::byte> block;
    std::vector<Transport::Request> requests;
  };

  Arrival& arrival(std::uint64_t sequence, int peer) {
    return arrivals_[(sequence % kSlots) * static_cast<std::uint64_t>(transport_.size()) +
                     static_cast<std::uint64_t>(peer)];
  }
  const Arrival& arrival(std::uint64_t sequence, int peer) const {
    return const_cast<LinearHeaderExchange*>(this)->arrival(sequence, peer);
  }
  void post(std::uint64_t sequence, int peer);
  /// A block whose earlier sends have completed, filled with the header and data.
  Departure& fill(std::uint64_t sequence, std::uint64_t digest, Bytes prefix, Bytes data);
  void send(Departure& departure, std::size_t nbytes, int peer);

  Transport& transport_;
  std::vector<Arrival> arrivals_;
  std::vector<std::unique_ptr<Departure>> departures_;
  std::size_t next_departure_ = 0;
  std::uint64_t released_ = 0;  // operations before this one have been released
  int next_peer_ = 1;           // of operation `released_`: peers rank+1 .. rank+next_peer_-1 have arrived
};

}  // namespace samestep
