#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace samestep {

/// The shared memory of a group: headers, progress counters, and buffers for data in transit. Counters only grow, and
/// each word has one writer unless stated otherwise. So nothing is ever reset, and nothing needs repair after a rank
/// has died.
///
/// Operation n uses slot n % kSlots. A slot is reused once all ranks have released its last operation.
///
/// The table lists the atomic words and the order of each access. A rank that loads with acquire a value stored with
/// release sees everything that its writer stored before; all other memory of the region is plain.
///
/// | word          | writer      | readers   | store / load      | publishes                        | used again    |
/// |---------------|-------------|-----------|-------------------|----------------------------------|---------------|
/// | ready_tag     | slot's rank | all       | release / acquire | its header, data, first segment  | once released |
/// | released      | its rank    | all       | release / acquire | its last reads of slots < n      | only grows    |
/// | step          | its rank    | all       | release / acquire | segments written and read so far | wraps around  |
/// | next_chunk    | all, add    | all       | relaxed           | nothing: the number is all       | only grows    |
/// | finished      | all, add    | all       | acq_rel / acquire | results of the chunks counted    | only grows    |
/// | Ring::written | sender      | receiver  | release / acquire | the frames up to it              | only grows    |
/// | Ring::read    | receiver    | sender    | release / acquire | its reads of the frames up to it | only grows    |
/// | left          | its rank    | all       | release / acquire | its leave_reason                 | never         |
/// | n_left        | all, add    | all       | release / acquire | the `left` of those counted      | only grows    |
/// | gate          | its rank    | all       | relaxed           | nothing: the headers publish it  | never         |
/// | begun         | its rank    | all       | seq_cst           | nothing: see WriteFence          | only grows    |
/// | ended         | its rank    | all       | release / acquire | its writes into others' arrays   | only grows    |
/// | epoch         | notifiers   | its rank  | release / acquire | nothing that is relied on        | wraps around  |
/// | n_waiters     | sleepers    | notifiers | relaxed           | nothing: wake-ups may be lost    | up and down   |
///
/// **Wake-ups are lossy.** A rank stores what others wait for, and then reads the number of sleepers, without a fence
/// in between; a sleeper counts itself, and then checks its condition. Each may miss the other. So no rank sleeps for
/// more than half a millisecond, and correctness never depends on a wake-up.
class ShmRegion {
 public:
  static constexpr std::uint64_t kSlots = 16;
  static constexpr std::uint64_t kBlocks = 8;  ///< of each rank, for inline data that do not fit into a slot
  static constexpr std::size_t kBlockBytes = 72 << 10;
  static constexpr std::uint64_t kStages = 2;  ///< of each rank, for copy-in/copy-out
  static constexpr std::size_t kStageBytes = 128 << 10;
  static constexpr std::size_t kSlotBytes = 128;  ///< two cache lines, which the prefetcher fetches in pairs
  /// Up to this many bytes it pays to demote written lines from this CPU's own caches, and to delay the first poll.
  static constexpr std::size_t kDemoteMaxBytes = 1536;
  static constexpr std::size_t kLeaveReasonBytes = 512;
  static constexpr int kSequenceBits = 48;  ///< of `ready_tag`
  static constexpr int kStepBits = 24;
  static constexpr std::uint64_t kLastStep = (1 << kStepBits) - 1;

  enum class Payload : std::uint32_t { same_line, next_line, block, per_peer };

  /// A rank's header of an operation.
  struct alignas(kSlotBytes) HeaderSlot {
    /// The number of the operation plus one; in the bits above, the CPU of the rank plus one, or 0. Stored last.
    std::atomic<std::uint64_t> ready_tag;
    std::uint64_t digest;
    std::uint32_t nbytes;
    Payload payload;  ///< where the data are: in the slot, in a block, or in a block with a table by rank
    std::array<std::byte, 40> same_line;  ///< data in the cache line of the tag
    std::array<std::byte, 64> next_line;  ///< data in the second cache line
  };
  struct PeerBlock {
    std::uint32_t offset, nbytes;
  };

  struct alignas(64) PaddedAtomic {
    std::atomic<std::uint64_t> value;
  };

  /// For waking the sleeping threads of a rank; see EventCountWaiter.
  struct alignas(64) EventCount {
    std::atomic<std::uint32_t> epoch, n_waiters;
  };

  /// A ring of messages from one rank to another: the bytes written and read so far.
  struct Ring {
    PaddedAtomic written, read;
    std::byte* bytes() { return reinterpret_cast<std::byte*>(this + 1); }
  };

  static std::size_t nbytes_for(int size);
  /// The event counts come first in the region. Nothing depends on them but the length of a sleep.
  static std::size_t nbytes_of_event_counts(int size);
  static std::size_t ring_nbytes(int size);

  /// `memory`: at least nbytes_for(size) bytes, initially zero.
  ShmRegion(std::shared_ptr<std::byte> memory, int size);

  int size() const { return static_cast<int>(size_); }

  HeaderSlot& header_slot(std::uint64_t number, int rank) {
    return header_slots_[(number % kSlots) * size_ + index(rank)];
  }
  /// Publishes a rank's progress within an operation, which defines the meaning of the steps 1 to kLastStep.
  void set_step(std::uint64_t number, int rank, std::uint64_t step) {
    this->step(number, rank).store((number << kStepBits) + step, std::memory_order_release);  // pairs with is_at
    notify(rank);
  }
  bool is_at(std::uint64_t number, int rank, std::uint64_t step) const {
    // pairs with set_step
    const std::uint64_t now = this->step(number, rank).load(std::memory_order_acquire);
    // The word is of this operation or of an earlier one: no rank begins the next one of the slot before all have left
    // this one. An earlier one may be any number of small operations ago, so that it is not compared by order: the word
    // wraps around after 2^40 of them, some days.
    return now - ((number << kStepBits) + step) <= kLastStep - step;
  }
  /// Chunks taken and finished so far, by all ranks and in all operations of the slot.
  std::atomic<std::uint64_t>& next_chunk(std::uint64_t number) { return next_chunk_[number % kSlots].value; }
  std::atomic<std::uint64_t>& finished(std::uint64_t number) { return finished_[number % kSlots].value; }
  /// The number of operations that a rank has released.
  std::atomic<std::uint64_t>& released(int rank) { return released_[2 * index(rank)].value; }

  /// The first operation in which a rank that has left takes no part, plus one; 0 if it has not left.
  std::atomic<std::uint64_t>& left(int rank) { return released_[2 * index(rank) + 1].value; }
  /// Why it has left: a Departure, written before `left`, whose release publishes it.
  std::byte* leave_reason(int rank) { return leave_reasons_ + index(rank) * kLeaveReasonBytes; }
  /// The number of ranks that have left; any rank adds to it.
  std::atomic<std::uint64_t>& n_left() { return next_chunk_[kSlots].value; }

  /// To be called on `rank` after storing what others may wait for. Lossy, see above.
  void notify(int rank) const {
    // relaxed, without a fence after the caller's store: a waiter that is missed wakes up by itself
    if (all_waiters().n_waiters.load(std::memory_order_relaxed) != 0) wake_waiters(rank);
  }
  EventCount& event_count(int rank) const { return event_counts_[index(rank)]; }
  /// Counts the sleeping threads of all ranks.
  EventCount& all_waiters() const { return event_counts_[size_]; }

  std::byte* block(int rank, std::uint64_t i) { return blocks_ + (index(rank) * kBlocks + i % kBlocks) * kBlockBytes; }
  std::byte* stage(int rank, std::uint64_t i) { return stages_ + (index(rank) * kStages + i % kStages) * kStageBytes; }
  Ring& ring(int from, int to) {
    return *reinterpret_cast<Ring*>(rings_ + (index(from) * size_ + index(to)) * (sizeof(Ring) + ring_nbytes_));
  }
  std::size_t ring_nbytes() const { return ring_nbytes_; }
  /// For the WriteFence of the group.
  std::shared_ptr<std::byte> fence_words() const { return {memory_, fence_words_}; }

 private:
  std::atomic<std::uint64_t>& step(std::uint64_t number, int rank) const {
    return steps_[(number % kSlots) * size_ + index(rank)].value;
  }
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  void wake_waiters(int rank) const;

  std::shared_ptr<std::byte> memory_;
  std::size_t size_;
  std::size_t ring_nbytes_;
  EventCount* event_counts_;
  HeaderSlot* header_slots_;
  PaddedAtomic* steps_;
  PaddedAtomic* next_chunk_;
  PaddedAtomic* finished_;
  PaddedAtomic* released_;
  std::byte* leave_reasons_;
  std::byte* rings_;
  std::byte* blocks_;
  std::byte* stages_;
  std::byte* fence_words_;
};

}  // namespace samestep
