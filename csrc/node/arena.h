#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace samestep {

/// The memory that the ranks of a group share for the group's own use: who is where in which operation, and room for
/// data on its way. Counters only grow, and each word has one writer unless it says otherwise: nothing is ever
/// reset, and nothing has to be mended after a rank that died.
///
/// Operation n uses slot n % kSlots. A slot is used again once all ranks have released its last operation.
class Arena {
 public:
  static constexpr std::uint64_t kSlots = 16;
  static constexpr std::uint64_t kBlocks = 8;  ///< of each rank, for data behind an announcement
  static constexpr std::size_t kBlockBytes = 72 << 10;
  static constexpr std::uint64_t kStages = 2;  ///< of each rank, for the pipeline through scratch memory
  static constexpr std::size_t kStageBytes = 128 << 10;
  static constexpr std::size_t kLineBytes = 128;  ///< two cache lines: the prefetcher takes them in pairs
  /// Up to this many bytes it pays to ask that what was written leaves this CPU's own caches, and to wait a moment
  /// before the first look at what others announce.
  static constexpr std::size_t kReadSoonest = 1536;
  static constexpr std::size_t kLastWords = 512;
  static constexpr int kNumberBits = 48;  ///< of a line's number
  static constexpr int kStepBits = 24;
  static constexpr std::uint64_t kLastStep = (1 << kStepBits) - 1;

  enum class Where : std::uint32_t { near, far, block, parts };

  /// What a rank announces of an operation.
  struct alignas(kLineBytes) Line {
    /// Of the operation, plus one; above that the CPU that its rank ran on, plus one, or 0. Stored last.
    std::atomic<std::uint64_t> number;
    std::uint64_t digest;
    std::uint32_t nbytes;
    Where where;                     ///< `near`, `far`, in a block of its rank, or there with a table of parts by rank
    std::array<std::byte, 40> near;  ///< in the cache line of the number
    std::array<std::byte, 64> far;   ///< a cache line of its own
  };
  struct Part {
    std::uint32_t offset, nbytes;
  };

  struct alignas(64) Word {
    std::atomic<std::uint64_t> value;
  };

  /// Wakes the threads of a rank that sleep, see NapAtBell.
  struct alignas(64) Bell {
    std::atomic<std::uint32_t> rung, n_asleep;
  };

  /// Of messages from one rank to another: bytes written and read so far.
  struct Ring {
    Word written, read;
    std::byte* bytes() { return reinterpret_cast<std::byte*>(this + 1); }
  };

  static std::size_t nbytes_for(int size);
  /// The first bytes of it are bells, on which nothing depends but how long somebody sleeps.
  static std::size_t nbytes_of_bells(int size);
  static std::size_t ring_nbytes(int size);

  /// `memory`: at least nbytes_for(size) bytes, zero before the first rank came.
  Arena(std::shared_ptr<std::byte> memory, int size);

  int size() const { return static_cast<int>(size_); }

  Line& line(std::uint64_t number, int rank) { return lines_[(number % kSlots) * size_ + index(rank)]; }
  /// How far a rank is within an operation: steps count from 1 to kLastStep, and what they mean is the operation's.
  void set_step(std::uint64_t number, int rank, std::uint64_t step) {
    this->step(number, rank).store((number << kStepBits) + step, std::memory_order_release);
    ring_bells(rank);
  }
  bool is_at(std::uint64_t number, int rank, std::uint64_t step) const {
    return this->step(number, rank).load(std::memory_order_acquire) >= (number << kStepBits) + step;
  }
  /// Chunks of an operation taken and finished so far, by all ranks and all operations of the slot together.
  std::atomic<std::uint64_t>& claimed(std::uint64_t number) { return claimed_[number % kSlots].value; }
  std::atomic<std::uint64_t>& finished(std::uint64_t number) { return finished_[number % kSlots].value; }
  /// How many operations a rank has released.
  std::atomic<std::uint64_t>& released(int rank) { return released_[2 * index(rank)].value; }

  /// The first operation that a rank which has left takes no part in, plus one; 0 while it is here.
  std::atomic<std::uint64_t>& left(int rank) { return released_[2 * index(rank) + 1].value; }
  /// Why it has left: a text of less than kLastWords bytes, written before `left`.
  char* last_words(int rank) { return last_words_ + index(rank) * kLastWords; }
  /// How many ranks have left; any rank adds to it.
  std::atomic<std::uint64_t>& n_left() { return claimed_[kSlots].value; }

  /// To be called by `rank` when it has stored what others may wait for. A store that a sleeper did not see, and whose
  /// writer did not yet see the sleeper, is found a little later: nobody sleeps for long.
  void ring_bells(int rank) const {
    if (all_asleep().n_asleep.load(std::memory_order_relaxed) != 0) wake(rank);
  }
  Bell& bell(int rank) const { return bells_[index(rank)]; }
  /// Counts the threads of all ranks together.
  Bell& all_asleep() const { return bells_[size_]; }

  std::byte* block(int rank, std::uint64_t i) { return blocks_ + (index(rank) * kBlocks + i % kBlocks) * kBlockBytes; }
  std::byte* stage(int rank, std::uint64_t i) { return stages_ + (index(rank) * kStages + i % kStages) * kStageBytes; }
  Ring& ring(int from, int to) {
    return *reinterpret_cast<Ring*>(rings_ + (index(from) * size_ + index(to)) * (sizeof(Ring) + ring_nbytes_));
  }
  std::size_t ring_nbytes() const { return ring_nbytes_; }

 private:
  std::atomic<std::uint64_t>& step(std::uint64_t number, int rank) const {
    return steps_[(number % kSlots) * size_ + index(rank)].value;
  }
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  void wake(int rank) const;

  std::shared_ptr<std::byte> memory_;
  std::size_t size_;
  std::size_t ring_nbytes_;
  Bell* bells_;
  Line* lines_;
  Word* steps_;
  Word* claimed_;
  Word* finished_;
  Word* released_;
  char* last_words_;
  std::byte* rings_;
  std::byte* blocks_;
  std::byte* stages_;
};

}  // namespace samestep
