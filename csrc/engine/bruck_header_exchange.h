#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/header_exchange.h"
#include "transport/transport.h"

namespace samestep {

/// A header exchange of log2(n) messages for each of n ranks: in round k a rank sends the headers that it has so far,
/// its own first, to the rank at distance 2^k. Headers pass through other ranks, so every rank must keep polling.
///
/// There is no data for single peers: it would pass through ranks for which it is not meant.
///
/// Source: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE TPDS 8 (1997), 1143-1156.
class BruckHeaderExchange final : public HeaderExchange {
 public:
  /// `max_inline`: bytes of data behind a header; 0: a default for the size of the group.
  BruckHeaderExchange(Transport& transport, std::size_t max_inline);

  bool can_post(std::uint64_t sequence) override { return sequence == posted_ && sequence < released_ + kSlots; }
  void post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) override;
  void post_per_peer(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes>, Bytes) override {
    post(sequence, digest, {}, {});
  }
  bool complete(std::uint64_t sequence) override;
  Header header(std::uint64_t sequence, int peer) const override;
  Bytes data(std::uint64_t sequence, int peer) const override;
  void release(std::uint64_t sequence) override;
  /// Ranks whose header is still passing through other ranks are reported too, until they send a notice; see
  /// `on_slow_wait`.
  std::vector<int> missing(std::uint64_t sequence) override;
  void on_slow_wait(std::uint64_t sequence) override;
  void abandon() override;

 private:
  static constexpr std::uint64_t kSlots = 2;  // operations whose messages are buffered at the same time

  struct Arrival {
    std::vector<std::byte> buffer;
    Transport::Request request;
  };
  struct Slot {
    std::vector<std::byte> gathered;   // headers and data of this rank and those before it, in that order
    std::vector<std::size_t> offsets;  // of each header in `gathered`
    std::vector<Arrival> receives;     // by round
    std::vector<Transport::Request> sends;
  };

  Slot& slot(std::uint64_t sequence) { return slots_[sequence % kSlots]; }
  const Slot& slot(std::uint64_t sequence) const { return slots_[sequence % kSlots]; }
  int rank_at_distance(std::size_t distance) const;
  std::size_t block_index(int peer) const;
  /// Headers that a rank holds when the round begins. It sends as many, or fewer in the last round.
  std::size_t blocks_before_round(std::size_t round) const { return std::size_t{1} << round; }
  std::size_t blocks_in_round(std::size_t round) const;
  const std::byte* block(std::uint64_t sequence, int peer) const;

  void post(Slot& slot, std::size_t round);
  void send(Slot& slot, std::size_t round);
  void receive_round(Slot& slot, std::size_t round);
  void poll_notices();

  Transport& transport_;
  std::size_t size_;
  std::size_t rounds_ = 0;
  std::array<Slot, kSlots> slots_;
  std::uint64_t posted_ = 0;  // number of operations
  std::uint64_t released_ = 0;
  std::size_t round_ = 0;                     // of operation `released_`
  std::vector<std::uint64_t> known_arrived_;  // by rank: operations that it has posted, by its notices
  std::uint64_t notified_ = 0;                // the last notice of this rank
  std::vector<std::pair<std::unique_ptr<std::uint64_t>, std::vector<Transport::Request>>> notices_;
};

}  // namespace samestep
