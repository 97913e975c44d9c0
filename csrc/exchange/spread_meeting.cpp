#include "exchange/spread_meeting.h"

#include <algorithm>
#include <cstring>

#include "exchange/tags.h"

namespace samestep {
namespace {

constexpr std::uint64_t kListenEvery = 64;  // operations: so that what nobody asked for does not pile up

}  // namespace

std::size_t SpreadMeeting::limit_for(std::size_t wanted, int size) {
  if (wanted != 0) return wanted;
  // Every rank hears all of it, and all the places that ranks of hosts at two levels tell of.
  constexpr std::size_t kTogether = 64 << 10, kLeast = 128, kMost = 2 << 10;
  return std::clamp(kTogether / static_cast<std::size_t>(size), kLeast, kMost);
}

SpreadMeeting::SpreadMeeting(Messenger& messenger, std::size_t limit)
    : messenger_(messenger), limit_(limit), size_(static_cast<std::size_t>(messenger.size())), known_from_(size_) {
  while (heard_before(rounds_) < size_) ++rounds_;
  for (Slot& slot : slots_) {
    slot.heard.reserve(size_ * (sizeof(Header) + limit));
    slot.arrivals.resize(rounds_);
    for (std::size_t round = 0; round < rounds_; ++round) {
      slot.arrivals[round].room.resize(told_in(round) * (sizeof(Header) + limit));
      post(slot, round);
    }
  }
}

int SpreadMeeting::rank_before(std::size_t distance) const {
  return static_cast<int>((static_cast<std::size_t>(messenger_.rank()) + size_ - distance) % size_);
}

std::size_t SpreadMeeting::distance_to(int peer) const {
  return (static_cast<std::size_t>(messenger_.rank()) + size_ - static_cast<std::size_t>(peer)) % size_;
}

std::size_t SpreadMeeting::told_in(std::size_t round) const {
  return std::min(heard_before(round), size_ - heard_before(round));
}

void SpreadMeeting::post(Slot& slot, std::size_t round) {
  Arrival& arrival = slot.arrivals[round];
  const int source = rank_before(heard_before(round));
  arrival.request = messenger_.receive(arrival.room.data(), arrival.room.size(), source, tags::kMeeting);
}

void SpreadMeeting::announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) {
  Slot& mine = slot(sequence);
  mine.heard.clear();
  mine.begins.assign(1, 0);
  const Header header{digest, static_cast<std::uint32_t>(sequence),
                      static_cast<std::uint32_t>(prefix.size() + data.size())};
  const auto* const bytes = reinterpret_cast<const std::byte*>(&header);
  mine.heard.insert(mine.heard.end(), bytes, bytes + sizeof header);
  mine.heard.insert(mine.heard.end(), prefix.begin(), prefix.end());
  mine.heard.insert(mine.heard.end(), data.begin(), data.end());
  ++announced_;
  if (rounds_ != 0) send(mine, 0);
}

void SpreadMeeting::send(Slot& slot, std::size_t round) {
  const std::size_t told = told_in(round);
  const std::size_t nbytes = told == slot.begins.size() ? slot.heard.size() : slot.begins[told];
  const auto dest = static_cast<int>((static_cast<std::size_t>(messenger_.rank()) + heard_before(round)) % size_);
  slot.sends.push_back(messenger_.send(slot.heard.data(), nbytes, dest, tags::kMeeting));
  count(1, nbytes);
}

void SpreadMeeting::hear(Slot& slot, std::size_t round) {
  const std::byte* from = slot.arrivals[round].room.data();
  for (std::size_t i = 0; i < told_in(round); ++i) {
    Header header;
    std::memcpy(&header, from, sizeof header);
    const std::size_t nbytes = sizeof header + header.nbytes;
    slot.begins.push_back(slot.heard.size());
    slot.heard.insert(slot.heard.end(), from, from + nbytes);  // within what was reserved: sends read it
    from += nbytes;
  }
}

bool SpreadMeeting::complete(std::uint64_t sequence) {
  if (sequence != released_) return false;
  Slot& mine = slot(sequence);
  for (; round_ < rounds_; ++round_) {
    if (!messenger_.test(mine.arrivals[round_].request)) return false;
    hear(mine, round_);
    post(mine, round_);
    if (round_ + 1 < rounds_) send(mine, round_ + 1);
  }
  while (!mine.sends.empty() && messenger_.test(mine.sends.back())) mine.sends.pop_back();
  return mine.sends.empty();
}

const std::byte* SpreadMeeting::block(std::uint64_t sequence, int peer) const {
  const Slot& mine = slot(sequence);
  return mine.heard.data() + mine.begins[distance_to(peer)];
}

Meeting::Header SpreadMeeting::header(std::uint64_t sequence, int peer) const {
  Header header;
  std::memcpy(&header, block(sequence, peer), sizeof header);
  return header;
}

SpreadMeeting::Bytes SpreadMeeting::data(std::uint64_t sequence, int peer) const {
  return {block(sequence, peer) + sizeof(Header), header(sequence, peer).nbytes};
}

void SpreadMeeting::release(std::uint64_t) {
  ++released_;
  round_ = 0;
  if (released_ % kListenEvery == 0) listen();
}

void SpreadMeeting::wait_is_long(std::uint64_t sequence) {
  const std::uint64_t mine = std::min(sequence + 1, announced_);
  if (told_ >= mine) return;
  told_ = mine;
  std::erase_if(telling_, [&](auto& words) {
    return std::all_of(words.second.begin(), words.second.end(), [&](auto& sent) { return messenger_.test(sent); });
  });
  auto& [word, requests] = telling_.emplace_back(std::make_unique<std::uint64_t>(told_), 0);
  for (std::size_t distance = 1; distance < size_; ++distance) {
    requests.push_back(messenger_.send(word.get(), sizeof *word, rank_before(distance), tags::kHasCome));
    count(1, sizeof *word);
  }
}

void SpreadMeeting::listen() {
  Messenger::Envelope from;
  while (messenger_.probe(tags::kHasCome, from)) {
    std::uint64_t announced = 0;
    Messenger::Request request = messenger_.receive(&announced, sizeof announced, from.source, tags::kHasCome);
    while (!messenger_.test(request)) {
    }
    std::uint64_t& known = known_from_[static_cast<std::size_t>(from.source)];
    known = std::max(known, announced);
  }
}

std::vector<int> SpreadMeeting::missing(std::uint64_t sequence) {
  if (sequence < released_) return {};
  if (sequence >= announced_ && released_ < announced_) sequence = released_;  // which is in the way
  listen();
  std::vector<int> ranks;
  const std::size_t heard = sequence == released_ && sequence < announced_ ? slot(sequence).begins.size() : 1;
  for (std::size_t distance = heard; distance < size_; ++distance) {
    const int peer = rank_before(distance);
    if (known_from_[static_cast<std::size_t>(peer)] <= sequence) ranks.push_back(peer);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void SpreadMeeting::abandon() {
  for (Slot& slot : slots_) {
    for (Arrival& arrival : slot.arrivals) {
      if (arrival.request.active) messenger_.cancel(arrival.request);
    }
  }
}

}  // namespace samestep
