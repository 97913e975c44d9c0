#include "exchange/message_meeting.h"

#include <cstring>

#include "exchange/tags.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

constexpr std::size_t kDepartures = 4;  // grows when more sends are under way

}  // namespace

std::size_t MessageMeeting::limit_for(std::size_t wanted, int size) {
  if (wanted != 0) return wanted;
  // Data behind a header goes to every peer, so what is cheap for two ranks is not for twenty.
  if (size <= 2) return 16 << 10;
  if (size <= 4) return 8 << 10;
  return 2 << 10;
}

MessageMeeting::MessageMeeting(Messenger& messenger, std::size_t limit)
    : messenger_(messenger), limit_(limit), arrivals_(kSlots * static_cast<std::size_t>(messenger.size())) {
  for (std::size_t i = 0; i < kDepartures; ++i) departures_.push_back(std::make_unique<Departure>());
  for (std::uint64_t sequence = 0; sequence < kSlots; ++sequence) {
    for (int peer = 0; peer < messenger.size(); ++peer) {
      if (peer == messenger.rank()) continue;
      arrival(sequence, peer).block.resize(sizeof(Header) + limit);
      post(sequence, peer);
    }
  }
}

void MessageMeeting::post(std::uint64_t sequence, int peer) {
  Arrival& place = arrival(sequence, peer);
  place.request = messenger_.receive(place.block.data(), place.block.size(), peer, tags::kMeeting);
}

MessageMeeting::Departure& MessageMeeting::fill(std::uint64_t sequence, std::uint64_t digest, Bytes prefix,
                                                Bytes data) {
  Departure* departure = departures_[next_departure_].get();
  for (Messenger::Request& request : departure->requests) {
    if (!messenger_.test(request)) {  // the oldest is still under way: one more
      const auto here = departures_.begin() + static_cast<std::ptrdiff_t>(next_departure_);
      departure = departures_.insert(here, std::make_unique<Departure>())->get();
      break;
    }
  }
  next_departure_ = (next_departure_ + 1) % departures_.size();
  departure->requests.clear();

  const std::size_t nbytes = prefix.size() + data.size();
  const Header header{digest, static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(nbytes)};
  if (departure->block.size() < sizeof header + nbytes) departure->block.resize(sizeof header + nbytes);
  std::byte* at = departure->block.data();
  std::memcpy(at, &header, sizeof header);
  at += sizeof header;
  kernels::copy(at, prefix.data(), prefix.size());
  kernels::copy(at + prefix.size(), data.data(), data.size());
  return *departure;
}

void MessageMeeting::send(Departure& departure, std::size_t nbytes, int peer) {
  departure.requests.push_back(messenger_.send(departure.block.data(), nbytes, peer, tags::kMeeting));
  count(1, nbytes);
}

void MessageMeeting::announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) {
  Departure& departure = fill(sequence, digest, prefix, data);
  for (int step = 1; step < messenger_.size(); ++step) {
    send(departure, sizeof(Header) + prefix.size() + data.size(), (messenger_.rank() + step) % messenger_.size());
  }
}

void MessageMeeting::announce_parts(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                                    Bytes prefix) {
  for (int step = 1; step < messenger_.size(); ++step) {
    const int peer = (messenger_.rank() + step) % messenger_.size();
    const Bytes part = parts[static_cast<std::size_t>(peer)];
    send(fill(sequence, digest, prefix, part), sizeof(Header) + prefix.size() + part.size(), peer);
  }
}

bool MessageMeeting::complete(std::uint64_t sequence) {
  if (sequence != released_) return false;
  while (scanned_ < messenger_.size()) {
    const int peer = (messenger_.rank() + scanned_) % messenger_.size();
    if (!messenger_.test(arrival(sequence, peer).request)) return false;
    ++scanned_;
  }
  return true;
}

Meeting::Header MessageMeeting::header(std::uint64_t sequence, int peer) const {
  Header header;
  std::memcpy(&header, arrival(sequence, peer).block.data(), sizeof header);
  return header;
}

MessageMeeting::Bytes MessageMeeting::data(std::uint64_t sequence, int peer) const {
  return {arrival(sequence, peer).block.data() + sizeof(Header), header(sequence, peer).nbytes};
}

void MessageMeeting::release(std::uint64_t sequence) {
  for (int step = 1; step < messenger_.size(); ++step) {
    post(sequence, (messenger_.rank() + step) % messenger_.size());
  }
  ++released_;
  scanned_ = 1;
}

std::vector<int> MessageMeeting::missing(std::uint64_t sequence) {
  std::vector<int> ranks;
  for (int peer = 0; peer < messenger_.size(); ++peer) {
    if (peer == messenger_.rank() || sequence < released_) continue;
    const bool has_room = sequence < released_ + kSlots;
    if (!has_room || !messenger_.test(arrival(sequence, peer).request)) ranks.push_back(peer);
  }
  return ranks;
}

void MessageMeeting::abandon() {
  for (Arrival& place : arrivals_) {
    if (place.request.active) messenger_.cancel(place.request);
  }
}

}  // namespace samestep
