#include "node/line_meeting.h"

#include <algorithm>
#include <cstring>

#include "kernels/prefetch.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

/// Most bytes that every rank reads from every other; reductions end earlier, see Crossings::together_to.
std::size_t limit_for(int size) {
  constexpr std::size_t kForPlaces = 64, kMost = (64 << 10) + kForPlaces, kTogether = 128 << 10, kLeast = 2 << 10;
  return std::clamp(kTogether / static_cast<std::size_t>(size), kLeast, kMost);
}

/// Who waits may look as well who has released what, so that no later operation has to: back to back, 8 bytes take 0.21
/// us so on a processor of Intel's instead of 0.27. Where a store into lines that another rank has read is slow, nobody
/// looks before there is need.
std::uint64_t look_after() { return kernels::gives_back() ? Arena::kSlots : 2; }

constexpr std::uint64_t kNumber = (std::uint64_t{1} << Arena::kNumberBits) - 1;

/// The operation that a line announces, plus one.
std::uint64_t number_of(const Arena::Line& line) { return line.number.load(std::memory_order_acquire) & kNumber; }

std::byte* put(std::byte* at, Meeting::Bytes bytes) {
  kernels::copy(at, bytes.data(), bytes.size());
  return at + bytes.size();
}

}  // namespace

LineMeeting::LineMeeting(std::shared_ptr<Arena> arena, int rank)
    : arena_(std::move(arena)),
      rank_(rank),
      size_(arena_->size()),
      limit_(limit_for(size_)),
      limit_of_parts_(std::min(limit_, Arena::kBlockBytes / static_cast<std::size_t>(size_) - sizeof(Arena::Part))),
      look_after_(look_after()) {}

void LineMeeting::look_who_released() {
  std::uint64_t least = released_;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) least = std::min(least, arena_->released(peer).load(std::memory_order_acquire));
  }
  released_by_all_ = least;
}

bool LineMeeting::has_room(std::uint64_t sequence) {
  if (sequence != announced_) return false;
  const auto fits = [&] {
    return sequence < released_by_all_ + Arena::kSlots && users_[n_blocks_ % Arena::kBlocks] <= released_by_all_;
  };
  if (fits()) return true;
  look_who_released();
  return fits();
}

std::byte* LineMeeting::take_block(std::uint64_t sequence, std::size_t nbytes) {
  constexpr std::size_t kMost = 4 << 10;  // of more, the hint is not worth its time
  expected_in_block_ = std::min(nbytes, kMost);
  users_[n_blocks_ % Arena::kBlocks] = sequence + 1;
  return arena_->block(rank_, n_blocks_++);
}

void LineMeeting::publish(std::uint64_t sequence, std::uint64_t digest, std::size_t nbytes, Arena::Where where) {
  Arena::Line& line = arena_->line(sequence, rank_);
  line.digest = digest;
  line.nbytes = static_cast<std::uint32_t>(nbytes);
  line.where = where;
  line.number.store((cpu_ << Arena::kNumberBits) | (sequence + 1), std::memory_order_release);
  arena_->ring_bells(rank_);
  announced_ = sequence + 1;
  count(1, nbytes);
}

void LineMeeting::announce(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) {
  Arena::Line& line = arena_->line(sequence, rank_);
  const std::size_t nbytes = prefix.size() + data.size();
  if (nbytes <= line.far.size()) {
    const bool near = nbytes <= line.near.size();
    put(put(near ? line.near.data() : line.far.data(), prefix), data);
    expected_in_block_ = 0;
    publish(sequence, digest, nbytes, near ? Arena::Where::near : Arena::Where::far);
    kernels::expect_to_be_read(&line, near ? sizeof line.number : sizeof line);
    return;
  }
  const std::uint64_t number = n_blocks_;
  std::byte* const block = take_block(sequence, nbytes);
  put(put(block, prefix), data);
  std::memcpy(line.near.data(), &number, sizeof number);
  publish(sequence, digest, nbytes, Arena::Where::block);
  if (nbytes <= Arena::kReadSoonest) {
    kernels::expect_to_be_read(&line, sizeof line.number);
    kernels::expect_to_be_read(block, nbytes);
  }
}

void LineMeeting::announce_parts(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                                 Bytes prefix) {
  const std::uint64_t number = n_blocks_;
  std::size_t together = parts.size() * (sizeof(Arena::Part) + prefix.size());
  for (const Bytes& part : parts) together += part.size();
  std::byte* const block = take_block(sequence, together);
  auto* const table = reinterpret_cast<Arena::Part*>(block);
  std::byte* at = block + parts.size() * sizeof(Arena::Part);
  std::size_t total = 0;
  for (std::size_t peer = 0; peer < parts.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    const std::size_t nbytes = prefix.size() + parts[peer].size();
    table[peer] = {static_cast<std::uint32_t>(at - block), static_cast<std::uint32_t>(nbytes)};
    at = put(put(at, prefix), parts[peer]);
    total += nbytes;
  }
  std::memcpy(arena_->line(sequence, rank_).near.data(), &number, sizeof number);
  publish(sequence, digest, total, Arena::Where::parts);
}

bool LineMeeting::complete(std::uint64_t sequence) {
  if (sequence != released_) return false;
  for (; scanned_ < size_; ++scanned_) {
    const int peer = rank_ + scanned_ < size_ ? rank_ + scanned_ : rank_ + scanned_ - size_;
    if (number_of(arena_->line(sequence, peer)) == sequence + 1) continue;
    if (sequence >= released_by_all_ + look_after_) look_who_released();
    return false;
  }
  return true;
}

bool LineMeeting::keeps_others_from(std::uint64_t sequence) const {
  if (cpu_ == 0) return true;
  for (int i = scanned_; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    if (number_of(arena_->line(sequence, peer)) == sequence + 1) continue;
    const std::uint64_t before = arena_->line(sequence - 1, peer).number.load(std::memory_order_acquire);
    const std::uint64_t cpu = before >> Arena::kNumberBits;
    if (cpu == 0 || cpu == cpu_) return true;
  }
  return false;
}

Meeting::Header LineMeeting::header(std::uint64_t sequence, int peer) const {
  const Arena::Line& line = arena_->line(sequence, peer);
  const auto number = static_cast<std::uint32_t>(line.number.load(std::memory_order_relaxed)) - 1;
  return {line.digest, number, static_cast<std::uint32_t>(data(sequence, peer).size())};
}

Meeting::Bytes LineMeeting::data(std::uint64_t sequence, int peer) const {
  const Arena::Line& line = arena_->line(sequence, peer);
  if (line.where == Arena::Where::near) return {line.near.data(), line.nbytes};
  if (line.where == Arena::Where::far) return {line.far.data(), line.nbytes};
  std::uint64_t number;
  std::memcpy(&number, line.near.data(), sizeof number);
  const std::byte* const block = arena_->block(peer, number);
  if (line.where == Arena::Where::block) return {block, line.nbytes};
  Arena::Part part;
  std::memcpy(&part, block + static_cast<std::size_t>(rank_) * sizeof part, sizeof part);
  return {block + part.offset, part.nbytes};
}

void LineMeeting::release(std::uint64_t sequence) {
  released_ = sequence + 1;
  scanned_ = 1;
  arena_->released(rank_).store(released_, std::memory_order_release);
  arena_->ring_bells(rank_);
  // The next operation is likely to be of the same kind.
  kernels::expect_to_write(&arena_->line(announced_, rank_), Arena::kLineBytes);
  kernels::expect_to_write(arena_->block(rank_, n_blocks_), expected_in_block_);
}

void LineMeeting::leave(std::uint64_t first_missing, const std::string& reason) {
  std::memcpy(arena_->last_words(rank_), reason.data(), std::min(reason.size(), Arena::kLastWords - 1));
  arena_->left(rank_).store(first_missing + 1, std::memory_order_release);
  arena_->n_left().fetch_add(1, std::memory_order_release);
  arena_->ring_bells(rank_);
}

bool LineMeeting::all_here(std::uint64_t sequence) const {
  if (arena_->n_left().load(std::memory_order_acquire) == 0) return true;
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint64_t left = arena_->left(peer).load(std::memory_order_acquire);
    if (left != 0 && sequence + 1 >= left) return false;
  }
  return true;
}

std::vector<int> LineMeeting::missing(std::uint64_t sequence) {
  std::vector<int> ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || sequence < released_) continue;
    const bool has_slot = sequence < released_ + Arena::kSlots;
    if (!has_slot || number_of(arena_->line(sequence, peer)) != sequence + 1) ranks.push_back(peer);
  }
  return ranks;
}

}  // namespace samestep
