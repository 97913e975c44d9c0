#include "engine/bruck_header_exchange.h"

#include <algorithm>
#include <cstring>

#include "transport/tags.h"

namespace samestep {
namespace {

constexpr std::uint64_t kPollNoticesEvery = 64;  // operations: unread notices must not pile up

HeaderExchange::Limits bruck_limits(int size, std::size_t given) {
  // Every rank receives the data of all, among them the addresses that HierarchicalCollective posts.
  constexpr std::size_t kOfAllRanks = 64 << 10, kMinInline = 128, kMaxInline = 2 << 10;
  const std::size_t most =
      given != 0 ? given : std::clamp(kOfAllRanks / static_cast<std::size_t>(size), kMinInline, kMaxInline);
  return {most, 0, most};
}

}  // namespace

BruckHeaderExchange::BruckHeaderExchange(Transport& transport, std::size_t max_inline)
    : HeaderExchange(bruck_limits(transport.size(), max_inline)),
      transport_(transport),
      size_(static_cast<std::size_t>(transport.size())),
      known_arrived_(size_) {
  while (blocks_before_round(rounds_) < size_) ++rounds_;
  // Receives are posted ahead for both slots, so that a header usually arrives directly in its buffer. One tag is
  // enough for all of them: each round has another source, and messages of one source arrive in the order of
  // operations.
  for (Slot& slot : slots_) {
    slot.gathered.reserve(size_ * (sizeof(Header) + limits().to_all));
    slot.receives.resize(rounds_);
    for (std::size_t round = 0; round < rounds_; ++round) {
      slot.receives[round].buffer.resize(blocks_in_round(round) * (sizeof(Header) + limits().to_all));
      post(slot, round);
    }
  }
}

int BruckHeaderExchange::rank_at_distance(std::size_t distance) const {
  return static_cast<int>((static_cast<std::size_t>(transport_.rank()) + size_ - distance) % size_);
}

std::size_t BruckHeaderExchange::block_index(int peer) const {
  return (static_cast<std::size_t>(transport_.rank()) + size_ - static_cast<std::size_t>(peer)) % size_;
}

std::size_t BruckHeaderExchange::blocks_in_round(std::size_t round) const {
  return std::min(blocks_before_round(round), size_ - blocks_before_round(round));
}

void BruckHeaderExchange::post(Slot& slot, std::size_t round) {
  Arrival& arrival = slot.receives[round];
  const int source = rank_at_distance(blocks_before_round(round));
  arrival.request = transport_.receive(arrival.buffer.data(), arrival.buffer.size(), source, tags::kHeaders);
}

void BruckHeaderExchange::post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) {
  // The slot is free: `can_post` allows an operation only once the one before the last has been released, and
  // `complete` has waited for its sends.
  Slot& mine = slot(sequence);
  mine.gathered.clear();
  mine.offsets.assign(1, 0);
  const Header header{digest, static_cast<std::uint32_t>(sequence),
                      static_cast<std::uint32_t>(prefix.size() + data.size())};
  const auto* const bytes = reinterpret_cast<const std::byte*>(&header);
  mine.gathered.insert(mine.gathered.end(), bytes, bytes + sizeof header);
  mine.gathered.insert(mine.gathered.end(), prefix.begin(), prefix.end());
  mine.gathered.insert(mine.gathered.end(), data.begin(), data.end());
  ++posted_;
  if (rounds_ != 0) send(mine, 0);
}

void BruckHeaderExchange::send(Slot& slot, std::size_t round) {
  const std::size_t n_blocks = blocks_in_round(round);
  const std::size_t nbytes = n_blocks == slot.offsets.size() ? slot.gathered.size() : slot.offsets[n_blocks];
  const auto dest =
      static_cast<int>((static_cast<std::size_t>(transport_.rank()) + blocks_before_round(round)) % size_);
  slot.sends.push_back(transport_.send(slot.gathered.data(), nbytes, dest, tags::kHeaders));
  count(1, nbytes);
}

void BruckHeaderExchange::receive_round(Slot& slot, std::size_t round) {
  const std::byte* from = slot.receives[round].buffer.data();
  for (std::size_t i = 0; i < blocks_in_round(round); ++i) {
    Header header;
    std::memcpy(&header, from, sizeof header);
    const std::size_t nbytes = sizeof header + header.nbytes;
    slot.offsets.push_back(slot.gathered.size());
    slot.gathered.insert(slot.gathered.end(), from,
                         from + nbytes);  // within the reserved capacity: sends in flight read it
    from += nbytes;
  }
}

bool BruckHeaderExchange::complete(std::uint64_t sequence) {
  // Operations complete in order, so there is one round in progress, that of the oldest operation.
  if (sequence != released_) return false;
  Slot& mine = slot(sequence);
  // A rank forwards in round k + 1 what it has received up to round k, so no round begins before the last one is
  // complete.
  for (; round_ < rounds_; ++round_) {
    if (!transport_.test(mine.receives[round_].request)) return false;
    receive_round(mine, round_);
    post(mine, round_);
    if (round_ + 1 < rounds_) send(mine, round_ + 1);
  }
  // Peers may still receive `gathered`, which the operation after the next overwrites: the operation is complete only
  // once all sends are.
  while (!mine.sends.empty() && transport_.test(mine.sends.back())) mine.sends.pop_back();
  return mine.sends.empty();
}

const std::byte* BruckHeaderExchange::block(std::uint64_t sequence, int peer) const {
  const Slot& mine = slot(sequence);
  return mine.gathered.data() + mine.offsets[block_index(peer)];
}

HeaderExchange::Header BruckHeaderExchange::header(std::uint64_t sequence, int peer) const {
  Header header;
  std::memcpy(&header, block(sequence, peer), sizeof header);
  return header;
}

BruckHeaderExchange::Bytes BruckHeaderExchange::data(std::uint64_t sequence, int peer) const {
  return {block(sequence, peer) + sizeof(Header), header(sequence, peer).nbytes};
}

void BruckHeaderExchange::release(std::uint64_t) {
  ++released_;
  round_ = 0;
  if (released_ % kPollNoticesEvery == 0) poll_notices();
}

void BruckHeaderExchange::on_slow_wait(std::uint64_t sequence) {
  // Headers that arrive through other ranks do not show who is late: one late rank holds up headers of many others. So
  // each rank that waits long announces itself to all, once for each operation, and errors name those that stay silent.
  const std::uint64_t mine = std::min(sequence + 1, posted_);
  if (notified_ >= mine) return;
  notified_ = mine;
  std::erase_if(notices_, [&](auto& words) {
    return std::all_of(words.second.begin(), words.second.end(), [&](auto& sent) { return transport_.test(sent); });
  });
  // Each notice has memory of its own, because sends of earlier ones may still read theirs.
  auto& [word, requests] = notices_.emplace_back(std::make_unique<std::uint64_t>(notified_), 0);
  for (std::size_t distance = 1; distance < size_; ++distance) {
    requests.push_back(transport_.send(word.get(), sizeof *word, rank_at_distance(distance), tags::kArrivedNotice));
    count(1, sizeof *word);
  }
}

void BruckHeaderExchange::poll_notices() {
  Transport::Envelope from;
  std::uint64_t n_posted = 0;
  while (transport_.take_arrived(tags::kArrivedNotice, &n_posted, sizeof n_posted, from)) {
    std::uint64_t& known = known_arrived_[static_cast<std::size_t>(from.source)];
    known = std::max(known, n_posted);
  }
}

std::vector<int> BruckHeaderExchange::missing(std::uint64_t sequence) {
  if (sequence < released_) return {};
  if (sequence >= posted_ && released_ < posted_)
    sequence = released_;  // a later operation cannot complete before this one
  poll_notices();
  std::vector<int> ranks;
  // `gathered` holds the headers of the ranks at distance 0, 1, 2, ..., without gaps. Nothing is known of ranks beyond
  // but their notices.
  const std::size_t n_gathered = sequence == released_ && sequence < posted_ ? slot(sequence).offsets.size() : 1;
  for (std::size_t distance = n_gathered; distance < size_; ++distance) {
    const int peer = rank_at_distance(distance);
    if (known_arrived_[static_cast<std::size_t>(peer)] <= sequence) ranks.push_back(peer);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void BruckHeaderExchange::abandon() {
  for (Slot& slot : slots_) {
    for (Arrival& arrival : slot.receives) {
      if (arrival.request.active) transport_.cancel(arrival.request);
    }
  }
}

}  // namespace samestep
