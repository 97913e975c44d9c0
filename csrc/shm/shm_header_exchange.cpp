#include "shm/shm_header_exchange.h"

#include <algorithm>
#include <cstring>

#include "kernels/prefetch.h"
#include "kernels/stream.h"

namespace samestep {
namespace {

/// The most inline bytes that every rank reads from every other one. Reductions use fewer, see
/// Thresholds::one_shot_max.
HeaderExchange::Limits shm_limits(int size) {
  constexpr std::size_t kDescriptorBytes = 64, kOfAllRanks = 128 << 10;
  constexpr std::size_t kMinInline = 2 << 10, kMaxInline = (64 << 10) + kDescriptorBytes;
  const auto n = static_cast<std::size_t>(size);
  const std::size_t to_all = std::clamp(kOfAllRanks / n, kMinInline, kMaxInline);
  const std::size_t per_peer = std::min(to_all, ShmRegion::kBlockBytes / n - sizeof(ShmRegion::PeerBlock));
  // Between two ranks the stages are faster for more bytes.
  return {to_all, per_peer, size > 2 ? ShmRegion::kBlockBytes : per_peer};
}

/// A waiting rank reads in advance which operations the others have released, so that no later operation has to: calls
/// of 8 bytes in a row take 0.21 us instead of 0.27 on an Intel Xeon. On AMD a store into lines that another rank has
/// read is slow, so no rank reads them before it needs to.
std::uint64_t max_unread_releases() { return kernels::owns_after_read() ? ShmRegion::kSlots : 2; }

constexpr std::uint64_t kSequenceMask = (std::uint64_t{1} << ShmRegion::kSequenceBits) - 1;

/// The operation whose header is in a slot, plus one.
std::uint64_t ready_sequence(const ShmRegion::HeaderSlot& slot) {
  return slot.ready_tag.load(std::memory_order_acquire) & kSequenceMask;  // pairs with publish_header
}

std::byte* put(std::byte* at, HeaderExchange::Bytes bytes) {
  kernels::copy(at, bytes.data(), bytes.size());
  return at + bytes.size();
}

}  // namespace

ShmHeaderExchange::ShmHeaderExchange(std::shared_ptr<ShmRegion> region, int rank)
    : HeaderExchange(shm_limits(region->size())),
      region_(std::move(region)),
      rank_(rank),
      size_(region_->size()),
      refresh_after_(max_unread_releases()) {}

void ShmHeaderExchange::refresh_min_released() {
  std::uint64_t least = released_;
  for (int peer = 0; peer < size_; ++peer) {
    // pairs with release(): slots and blocks of operations before are no longer read
    if (peer != rank_) least = std::min(least, region_->released(peer).load(std::memory_order_acquire));
  }
  min_released_ = least;
}

bool ShmHeaderExchange::can_post(std::uint64_t sequence) {
  // A slot is free once all ranks have released the operation that used it before. The same holds for a block. There
  // are fewer blocks than slots, because only longer data use them.
  if (sequence != posted_) return false;
  const auto fits = [&] {
    return sequence < min_released_ + ShmRegion::kSlots &&
           block_users_[n_blocks_ % ShmRegion::kBlocks] <= min_released_;
  };
  // Mostly the old bound is enough. A new one takes a cache line from each peer.
  if (fits()) return true;
  refresh_min_released();
  return fits();
}

std::byte* ShmHeaderExchange::take_block(std::uint64_t sequence, std::size_t nbytes) {
  constexpr std::size_t kMaxExpected = 4 << 10;  // for more bytes the hint costs more than it saves
  expected_in_block_ = std::min(nbytes, kMaxExpected);
  block_users_[n_blocks_ % ShmRegion::kBlocks] = sequence + 1;
  return region_->block(rank_, n_blocks_++);
}

void ShmHeaderExchange::publish_header(std::uint64_t sequence, std::uint64_t digest, std::size_t nbytes,
                                       ShmRegion::Payload where) {
  ShmRegion::HeaderSlot& slot = region_->header_slot(sequence, rank_);
  slot.digest = digest;
  slot.nbytes = static_cast<std::uint32_t>(nbytes);
  slot.payload = where;
  // pairs with ready_sequence
  slot.ready_tag.store((cpu_ << ShmRegion::kSequenceBits) | (sequence + 1), std::memory_order_release);
  region_->notify(rank_);
  posted_ = sequence + 1;
  count(1, nbytes);
}

void ShmHeaderExchange::post(std::uint64_t sequence, std::uint64_t digest, Bytes data, Bytes prefix) {
  ShmRegion::HeaderSlot& slot = region_->header_slot(sequence, rank_);
  const std::size_t nbytes = prefix.size() + data.size();
  // Up to 40 bytes share the line of the tag. 41 to 64 get a line of their own: across two lines, a vector store would
  // need both transfers (docs/design/0012).
  if (nbytes <= slot.next_line.size()) {
    const bool in_first_line = nbytes <= slot.same_line.size();
    put(put(in_first_line ? slot.same_line.data() : slot.next_line.data(), prefix), data);
    expected_in_block_ = 0;
    publish_header(sequence, digest, nbytes,
                   in_first_line ? ShmRegion::Payload::same_line : ShmRegion::Payload::next_line);
    kernels::demote_lines(&slot, in_first_line ? sizeof slot.ready_tag : sizeof slot);
    return;
  }
  const std::uint64_t number = n_blocks_;
  std::byte* const block = take_block(sequence, nbytes);
  put(put(block, prefix), data);
  // Peers find the block by its number, which is in the line that they read anyway.
  std::memcpy(slot.same_line.data(), &number, sizeof number);
  publish_header(sequence, digest, nbytes, ShmRegion::Payload::block);
  if (nbytes <= ShmRegion::kDemoteMaxBytes) {
    kernels::demote_lines(&slot, sizeof slot.ready_tag);
    kernels::demote_lines(block, nbytes);
  }
}

void ShmHeaderExchange::post_per_peer(std::uint64_t sequence, std::uint64_t digest, std::span<const Bytes> parts,
                                      Bytes prefix) {
  if (size_ == 2) return post(sequence, digest, parts[static_cast<std::size_t>(1 - rank_)], prefix);  // without a table
  const std::uint64_t number = n_blocks_;
  std::size_t together = parts.size() * (sizeof(ShmRegion::PeerBlock) + prefix.size());
  for (const Bytes& part : parts) together += part.size();
  std::byte* const block = take_block(sequence, together);
  auto* const table = reinterpret_cast<ShmRegion::PeerBlock*>(block);
  std::byte* at = block + parts.size() * sizeof(ShmRegion::PeerBlock);
  std::size_t total = 0;
  for (std::size_t peer = 0; peer < parts.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    const std::size_t nbytes = prefix.size() + parts[peer].size();
    table[peer] = {static_cast<std::uint32_t>(at - block), static_cast<std::uint32_t>(nbytes)};
    at = put(put(at, prefix), parts[peer]);
    total += nbytes;
  }
  std::memcpy(region_->header_slot(sequence, rank_).same_line.data(), &number, sizeof number);
  publish_header(sequence, digest, total, ShmRegion::Payload::per_peer);
}

bool ShmHeaderExchange::complete(std::uint64_t sequence) {
  if (sequence != released_) return false;
  // Ranks that have posted are not read again, so each poll reads one line: that of the first rank that is missing.
  for (; next_peer_ < size_; ++next_peer_) {
    const int peer = rank_ + next_peer_ < size_ ? rank_ + next_peer_ : rank_ + next_peer_ - size_;
    if (ready_sequence(region_->header_slot(sequence, peer)) == sequence + 1) continue;
    if (sequence >= min_released_ + refresh_after_) refresh_min_released();
    return false;
  }
  return true;
}

bool ShmHeaderExchange::shares_cpu_with_missing(std::uint64_t sequence) const {
  // Unknown, so a yield may be needed.
  if (cpu_ == 0) return true;
  for (int i = next_peer_; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    if (ready_sequence(region_->header_slot(sequence, peer)) == sequence + 1) continue;
    // What is known is the CPU on which the rank posted its last header. It may have moved: then this rank polls a
    // little too long, or yields in vain.
    // pairs with publish_header
    const std::uint64_t before = region_->header_slot(sequence - 1, peer).ready_tag.load(std::memory_order_acquire);
    const std::uint64_t cpu = before >> ShmRegion::kSequenceBits;
    if (cpu == 0 || cpu == cpu_) return true;
  }
  return false;
}

HeaderExchange::Header ShmHeaderExchange::header(std::uint64_t sequence, int peer) const {
  const ShmRegion::HeaderSlot& slot = region_->header_slot(sequence, peer);
  // relaxed: complete() has acquired it
  const auto number = static_cast<std::uint32_t>(slot.ready_tag.load(std::memory_order_relaxed)) - 1;
  return {slot.digest, number, static_cast<std::uint32_t>(data(sequence, peer).size())};
}

HeaderExchange::Bytes ShmHeaderExchange::data(std::uint64_t sequence, int peer) const {
  const ShmRegion::HeaderSlot& slot = region_->header_slot(sequence, peer);
  if (slot.payload == ShmRegion::Payload::same_line) return {slot.same_line.data(), slot.nbytes};
  if (slot.payload == ShmRegion::Payload::next_line) return {slot.next_line.data(), slot.nbytes};
  std::uint64_t number;
  std::memcpy(&number, slot.same_line.data(), sizeof number);
  const std::byte* const block = region_->block(peer, number);
  if (slot.payload == ShmRegion::Payload::block) return {block, slot.nbytes};
  ShmRegion::PeerBlock part;
  std::memcpy(&part, block + static_cast<std::size_t>(rank_) * sizeof part, sizeof part);
  return {block + part.offset, part.nbytes};
}

void ShmHeaderExchange::release(std::uint64_t sequence) {
  released_ = sequence + 1;
  next_peer_ = 1;
  region_->released(rank_).store(released_, std::memory_order_release);  // pairs with refresh_min_released
  region_->notify(rank_);
  // The next operation is probably of the same kind: fetches its slot and block for writing while there is time.
  kernels::prefetch_for_write(&region_->header_slot(posted_, rank_), ShmRegion::kSlotBytes);
  kernels::prefetch_for_write(region_->block(rank_, n_blocks_), expected_in_block_);
}

void ShmHeaderExchange::leave(std::uint64_t first_absent, const Departure& why) {
  static_assert(sizeof why <= ShmRegion::kLeaveReasonBytes);
  std::memcpy(region_->leave_reason(rank_), &why, sizeof why);
  region_->left(rank_).store(first_absent + 1, std::memory_order_release);  // pairs with ShmTransport::failed_peers
  // The count last: a rank that sees it finds the flag and the report. Operations read nothing but this count as long
  // as all are present.
  region_->n_left().fetch_add(1, std::memory_order_release);  // pairs with all_present
  region_->notify(rank_);
}

bool ShmHeaderExchange::all_present(std::uint64_t sequence) const {
  if (region_->n_left().load(std::memory_order_acquire) == 0) return true;  // pairs with leave
  for (int peer = 0; peer < size_; ++peer) {
    const std::uint64_t left = region_->left(peer).load(std::memory_order_acquire);  // pairs with leave
    if (left != 0 && sequence + 1 >= left) return false;
  }
  return true;
}

std::vector<int> ShmHeaderExchange::missing(std::uint64_t sequence) {
  std::vector<int> ranks;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || sequence < released_) continue;
    const bool has_slot = sequence < released_ + ShmRegion::kSlots;
    if (!has_slot || ready_sequence(region_->header_slot(sequence, peer)) != sequence + 1) ranks.push_back(peer);
  }
  return ranks;
}

}  // namespace samestep
