#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "exchange/meeting.h"
#include "exchange/messenger.h"

namespace samestep {

/// A meeting in log2(n) messages of each of n ranks: in round k a rank tells the one 2^k further on all that it has
/// heard so far, itself first. So everybody hears everybody's words, as in a MessageMeeting; but they come through
/// others, who have to wait or to test now and then.
///
/// There are no parts: what differs by receiver would go through ranks that it is not meant for.
///
/// Source: Bruck, Ho, Kipnis, Upfal and Weathersby, IEEE TPDS 8 (1997), 1143-1156.
class SpreadMeeting final : public Meeting {
 public:
  /// Bytes behind a header: `wanted`, or where that is 0 what serves a group of this size.
  static std::size_t limit_for(std::size_t wanted, int size);

  SpreadMeeting(Messenger& messenger, std::size_t limit);

  std::size_t limit() const override { return limit_; }
  std::size_t limit_of_parts() const override { return 0; }
  bool has_room(std::uint64_t sequence) override { return sequence == announced_ && sequence < released_ + kSlots; }
  void announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) override;
  void announce_parts(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes>, Bytes) override {
    announce(sequence, digest, {}, {});
  }
  bool complete(std::uint64_t sequence) override;
  Header header(std::uint64_t sequence, int peer) const override;
  Bytes data(std::uint64_t sequence, int peer) const override;
  void release(std::uint64_t sequence) override;
  /// Who is heard of late may have come in time: exact only once those who wait have told so, see
  /// `wait_is_long`.
  std::vector<int> missing(std::uint64_t sequence) override;
  void wait_is_long(std::uint64_t sequence) override;
  void abandon() override;

 private:
  static constexpr std::uint64_t kSlots = 2;  // operations whose messages have room at the same time

  struct Arrival {
    std::vector<std::byte> room;
    Messenger::Request request;
  };
  struct Slot {
    std::vector<std::byte> heard;     // headers and data of this rank and those before it, in that order
    std::vector<std::size_t> begins;  // where each begins
    std::vector<Arrival> arrivals;    // by round
    std::vector<Messenger::Request> sends;
  };

  Slot& slot(std::uint64_t sequence) { return slots_[sequence % kSlots]; }
  const Slot& slot(std::uint64_t sequence) const { return slots_[sequence % kSlots]; }
  int rank_before(std::size_t distance) const;
  std::size_t distance_to(int peer) const;
  /// Ranks that a rank has heard of when the round begins; as many are told of, or fewer in the last one.
  std::size_t heard_before(std::size_t round) const { return std::size_t{1} << round; }
  std::size_t told_in(std::size_t round) const;
  const std::byte* block(std::uint64_t sequence, int peer) const;

  void post(Slot& slot, std::size_t round);
  void send(Slot& slot, std::size_t round);
  void hear(Slot& slot, std::size_t round);
  void listen();

  Messenger& messenger_;
  std::size_t limit_;
  std::size_t size_;
  std::size_t rounds_ = 0;
  std::array<Slot, kSlots> slots_;
  std::uint64_t announced_ = 0;  // operations so far
  std::uint64_t released_ = 0;
  std::size_t round_ = 0;                  // of operation `released_`
  std::vector<std::uint64_t> known_from_;  // by rank: operations that it says it has announced
  std::uint64_t told_ = 0;                 // what this rank has said of itself
  std::vector<std::pair<std::unique_ptr<std::uint64_t>, std::vector<Messenger::Request>>> telling_;
};

}  // namespace samestep
