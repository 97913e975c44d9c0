#include "shm/write_fence.h"

#include "core/deadline.h"
#include "shm/shared_heap.h"
#include "waiting/backoff.h"

namespace samestep {
namespace {

// A write that is neither ended, nor its rank stopped, after this time was never seen; the copy of a chunk takes
// microseconds.
constexpr Seconds kPatience{10};

}  // namespace

WriteFence::WriteFence(std::shared_ptr<LocalPeers> peers, std::vector<int> members, std::size_t index,
                       std::shared_ptr<std::byte> words)
    : peers_(std::move(peers)),
      members_(std::move(members)),
      index_(index),
      memory_(std::move(words)),
      words_(reinterpret_cast<Words*>(memory_.get())) {
  // relaxed: published by the first header that this rank posts
  words_[index_].gate.store(peers_->open_gate(), std::memory_order_relaxed);
}

WriteFence::~WriteFence() {
  // relaxed: this rank has stored it
  const std::uint64_t gate = words_[index_].gate.load(std::memory_order_relaxed);
  // A closed one stays: a rank that was stopped may still come to it.
  if (gate != 0 && !is_closed_) peers_->free_gate(gate);
}

bool WriteFence::write(std::size_t index, std::span<const RemoteSegment> pieces) {
  Words& mine = words_[index_];
  // seq_cst: before the gate is looked at; pairs with close
  mine.begun.fetch_add(1, std::memory_order_seq_cst);
  // relaxed: the header that brought the address of the array has published it
  const std::uint64_t gate = words_[index].gate.load(std::memory_order_relaxed);
  const auto end = [&mine] {
    mine.ended.fetch_add(1, std::memory_order_release);  // pairs with close: what was written is visible there
  };
  try {
    const bool written = peers_->write_peer(members_[index], gate, pieces);
    end();
    return written;
  } catch (...) {
    end();
    throw;
  }
}

bool WriteFence::write(std::size_t index, std::uint64_t to, const void* from, std::size_t nbytes) {
  const RemoteSegment piece{static_cast<std::byte*>(const_cast<void*>(from)), to, nbytes};
  return nbytes == 0 || write(index, {&piece, 1});
}

void WriteFence::leave(std::uint64_t first_absent) {
  std::atomic<std::uint64_t>& left = words_[index_].left;
  const std::uint64_t before = left.load(std::memory_order_relaxed);  // relaxed: only this rank writes it
  if (before != 0 && before <= first_absent + 1) return;
  left.store(first_absent + 1, std::memory_order_release);  // pairs with all_present
}

bool WriteFence::all_present(std::uint64_t sequence) const {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const std::uint64_t left = words_[i].left.load(std::memory_order_acquire);  // pairs with leave
    if (left != 0 && sequence + 1 >= left) return false;
  }
  return true;
}

void WriteFence::close() {
  // relaxed: this rank has stored it
  const std::uint64_t gate = words_[index_].gate.load(std::memory_order_relaxed);
  if (gate == 0 || is_closed_) return;
  is_closed_ = true;
  peers_->close_gate(gate);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (i == index_) continue;
    // A write that is not counted here begins after the gate was closed.
    const std::uint64_t begun = words_[i].begun.load(std::memory_order_seq_cst);  // pairs with write
    const Deadline deadline = Deadline::after(kPatience);
    Backoff pause(/*oversubscribed=*/true);
    while (words_[i].ended.load(std::memory_order_acquire) < begun) {  // pairs with write
      // One that is stopped has finished the call that it was in, and the gate refuses the next.
      if (peers_->ended(members_[i]) || peers_->is_stopped(members_[i]) || deadline.passed()) break;
      pause.step();
    }
  }
}

void WriteFence::withdraw(const void* data, std::size_t nbytes) {
  if (const std::shared_ptr<SharedHeap> heap = peers_->heap()) heap->withdraw(data, nbytes);
}

}  // namespace samestep
