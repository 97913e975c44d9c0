#pragma once

#include <memory>
#include <vector>

#include "exchange/meeting.h"
#include "exchange/messenger.h"

namespace samestep {

/// A meeting by messages: one to each other rank. Receives are posted ahead, so a message finds its place when it
/// arrives.
class MessageMeeting : public Meeting {
 public:
  /// Bytes behind a header: `wanted`, or where that is 0 what serves a group of this size.
  static std::size_t limit_for(std::size_t wanted, int size);

  MessageMeeting(Messenger& messenger, std::size_t limit);

  std::size_t limit() const override { return limit_; }
  std::size_t limit_of_parts() const override { return limit_; }
  /// Many more messages that nobody receives yet have been seen to stop MPICH 5.0.2 for good.
  bool has_room(std::uint64_t sequence) override { return sequence < released_ + kAhead; }
  void announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) override;
  void announce_parts(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                      Bytes prefix) override;
  bool complete(std::uint64_t sequence) override;
  Header header(std::uint64_t sequence, int peer) const override;
  Bytes data(std::uint64_t sequence, int peer) const override;
  void release(std::uint64_t sequence) override;
  std::vector<int> missing(std::uint64_t sequence) override;
  void abandon() override;

 private:
  static constexpr std::uint64_t kAhead = 16;  // operations announced before the first of them is over
  static constexpr std::uint64_t kSlots = 2;   // operations whose messages have room at the same time

  struct Arrival {
    std::vector<std::byte> block;
    Messenger::Request request;
  };
  struct Departure {
    std::vector<std::byte> block;
    std::vector<Messenger::Request> requests;
  };

  Arrival& arrival(std::uint64_t sequence, int peer) {
    return arrivals_[(sequence % kSlots) * static_cast<std::uint64_t>(messenger_.size()) +
                     static_cast<std::uint64_t>(peer)];
  }
  const Arrival& arrival(std::uint64_t sequence, int peer) const {
    return const_cast<MessageMeeting*>(this)->arrival(sequence, peer);
  }
  void post(std::uint64_t sequence, int peer);
  /// A block whose sends have ended, filled.
  Departure& fill(std::uint64_t sequence, std::uint64_t digest, Bytes prefix, Bytes data);
  void send(Departure& departure, std::size_t nbytes, int peer);

  Messenger& messenger_;
  std::size_t limit_;
  std::vector<Arrival> arrivals_;
  std::vector<std::unique_ptr<Departure>> departures_;
  std::size_t next_departure_ = 0;
  std::uint64_t released_ = 0;  // operations before this one have been released
  int scanned_ = 1;             // of operation `released_`: peers rank+1 .. rank+scanned_-1 have arrived
};

}  // namespace samestep
