#include "engine/linear_header_exchange.h"

#include <cstring>

#include "kernels/stream.h"
#include "transport/tags.h"

namespace samestep {
namespace {

constexpr std::size_t kDepartures = 4;  // blocks to begin with; more are added while sends are in flight

HeaderExchange::Limits linear_limits(int size, std::size_t given) {
  // Inline data are sent to every peer, so a limit that is good for two ranks is too high for twenty.
  const std::size_t most = given != 0 ? given : size <= 2 ? 16 << 10 : size <= 4 ? 8 << 10 : 2 << 10;
  return {most, most, most};
}

}  // namespace

LinearHeaderExchange::LinearHeaderExchange(Transport& transport, std::size_t max_inline)
    : HeaderExchange(linear_limits(transport.size(), max_inline)),
      transport_(transport),
      arrivals_(kSlots * static_cast<std::size_t>(transport.size())) {
  for (std::size_t i = 0; i < kDepartures; ++i) departures_.push_back(std::make_unique<Departure>());
  for (std::uint64_t sequence = 0; sequence < kSlots; ++sequence) {
    for (int peer = 0; peer < transport.size(); ++peer) {
      if (peer == transport.rank()) continue;
      arrival(sequence, peer).block.resize(sizeof(Header) + limits().to_all);
      post(sequence, peer);
    }
  }
}

void LinearHeaderExchange::post(std::uint64_t sequence, int peer) {
  Arrival& place = arrival(sequence, peer);
  place.request = transport_.receive(place.block.data(), place.block.size(), peer, tags::kHeaders);
}

LinearHeaderExchange::Departure& LinearHeaderExchange::fill(std::uint64_t sequence, std::uint64_t digest, Bytes prefix,
                                                            Bytes data) {
  Departure* departure = departures_[next_departure_].get();
  for (Transport::Request& request : departure->requests) {
    // Blocks are used in turn, so this is the one whose sends are the oldest. A new block is inserted here and not at
    // the end, which keeps them in the order of their age.
    if (!transport_.test(request)) {  // even the oldest is still in flight: add one
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

void LinearHeaderExchange::send(Departure& departure, std::size_t nbytes, int peer) {
  departure.requests.push_back(transport_.send(departure.block.data(), nbytes, peer, tags::kHeaders));
  count(1, nbytes);
}

void LinearHeaderExchange::post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) {
  Departure& departure = fill(sequence, digest, prefix, data);
  // Each rank begins with the rank after it, so that not all of them send to rank 0 first.
  for (int step = 1; step < transport_.size(); ++step) {
    send(departure, sizeof(Header) + prefix.size() + data.size(), (transport_.rank() + step) % transport_.size());
  }
}

void LinearHeaderExchange::post_per_peer(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                                         Bytes prefix) {
  for (int step = 1; step < transport_.size(); ++step) {
    const int peer = (transport_.rank() + step) % transport_.size();
    const Bytes part = parts[static_cast<std::size_t>(peer)];
    send(fill(sequence, digest, prefix, part), sizeof(Header) + prefix.size() + part.size(), peer);
  }
}

bool LinearHeaderExchange::complete(std::uint64_t sequence) {
  // Operations complete in order, so `next_peer_` belongs to the oldest one.
  if (sequence != released_) return false;
  while (next_peer_ < transport_.size()) {
    const int peer = (transport_.rank() + next_peer_) % transport_.size();
    if (!transport_.test(arrival(sequence, peer).request)) return false;
    ++next_peer_;
  }
  return true;
}

HeaderExchange::Header LinearHeaderExchange::header(std::uint64_t sequence, int peer) const {
  Header header;
  std::memcpy(&header, arrival(sequence, peer).block.data(), sizeof header);
  return header;
}

LinearHeaderExchange::Bytes LinearHeaderExchange::data(std::uint64_t sequence, int peer) const {
  return {arrival(sequence, peer).block.data() + sizeof(Header), header(sequence, peer).nbytes};
}

void LinearHeaderExchange::release(std::uint64_t sequence) {
  // The buffers are free now, and serve the operation `kSlots` later. Peers that are ahead by more than that have sent
  // unexpected messages, whose number `can_post` bounds.
  for (int step = 1; step < transport_.size(); ++step) {
    post(sequence, (transport_.rank() + step) % transport_.size());
  }
  ++released_;
  next_peer_ = 1;
}

std::vector<int> LinearHeaderExchange::missing(std::uint64_t sequence) {
  std::vector<int> ranks;
  for (int peer = 0; peer < transport_.size(); ++peer) {
    if (peer == transport_.rank() || sequence < released_) continue;
    // No receive is posted yet for an operation so far ahead. Whether a peer has sent its header is unknown, so it
    // counts as missing.
    const bool has_slot = sequence < released_ + kSlots;
    if (!has_slot || !transport_.test(arrival(sequence, peer).request)) ranks.push_back(peer);
  }
  return ranks;
}

void LinearHeaderExchange::abandon() {
  for (Arrival& place : arrivals_) {
    if (place.request.active) transport_.cancel(place.request);
  }
}

}  // namespace samestep
