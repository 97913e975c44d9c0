#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/fork_listener.h"
#include "node/block_pool.h"
#include "os/shared_memory.h"

namespace samestep {

/// A process's memory that other processes can map: segments of shared memory, cut into blocks that are used again.
/// Pages are made present when a block is first cut, not while it is used.
///
/// After a fork the child has the blocks to itself: what it writes stays its own, it sees what the parent writes to
/// pages that it has not written, and `allocate` gives it nothing. The parent keeps the blocks that the child sees
/// apart until the child has ended or called exec.
///
/// Thread-safe. No call throws.
class SharedHeap final : private ForkListener {
 public:
  /// Pages are made present, and given back, in parts of so many bytes.
  static constexpr std::size_t kPart = 64 << 10;

  SharedHeap();
  ~SharedHeap() override;

  struct Spot {
    std::uint32_t segment;
    std::uint64_t offset;
  };
  struct Usage {
    BlockPool::Usage blocks;
    std::size_t present = 0;   ///< bytes that the system has given
    std::size_t segments = 0;  ///< what blocks are cut from; their number never falls
  };
  struct Block {
    void* data = nullptr;
    bool is_zero = false;  ///< else it holds what somebody left there
  };

  /// A block of at least `nbytes`, at the start of a page; null if there is no memory left.
  Block allocate(std::size_t nbytes);
  /// False if no block in use begins at `data`; then nothing happens.
  bool free(void* data);
  /// Size of the block in use that begins at `data`, else 0.
  std::size_t size_of(const void* data) const;

  /// Lets the pages at `at` be those of the block that begins at `data`: what is written to one is read in the other.
  /// The block must outlive that. False if there is no such block, or the system refuses.
  bool show_at(const void* data, std::size_t nbytes, void* at) const;

  /// Where a range lies, if it lies in one segment.
  std::optional<Spot> find(const void* data, std::size_t nbytes) const;
  /// Calls `give(const SharedMemory&) -> bool` the first time it is called for a segment. Returns what that returned.
  template <class Give>
  bool announce(std::uint32_t segment, Give give);

  /// `limit`: most bytes to be present, beyond it there is no memory left. `keep`: when more than so many of them are
  /// in no block, pages are given back to the system.
  void set_bounds(std::size_t limit, std::size_t keep);
  Usage usage();

 private:
  struct Segment {
    SharedMemory memory;
    std::vector<char> present;      // by part, 0 or 1: bytes are looked through faster than bits
    std::optional<bool> announced;  // with success?
  };
  /// A child that lives as long as the other end of this pipe is open.
  struct Child {
    std::uint32_t number;
    Fd alive;
  };

  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override;
  void after_fork_in_child() noexcept override;

  bool may_own(const void* data) const;
  std::optional<std::uint64_t> place_of(const void* data) const;
  std::byte* at(std::uint64_t place) const;
  std::optional<std::uint64_t> take(std::size_t nbytes);
  bool grow(std::size_t nbytes);
  bool make_present(std::uint64_t place, std::size_t nbytes, bool& was_absent);
  std::size_t needed() const;
  std::size_t spare() const;
  void trim(std::size_t to);
  void look_after_children();

  mutable std::mutex mutex_;
  BlockPool pool_;
  std::vector<Segment> segments_;
  std::atomic<std::uintptr_t> lowest_ = std::numeric_limits<std::uintptr_t>::max();
  std::atomic<std::uintptr_t> highest_ = 0;
  std::size_t mapped_ = 0, present_ = 0;
  std::size_t limit_ = std::numeric_limits<std::size_t>::max();
  std::size_t keep_ = std::size_t{1} << 30;
  std::size_t trim_from_ = keep_;
  std::vector<Child> children_;
  std::pair<Fd, Fd> lifeline_;  // of the child that is being made
  bool is_child_ = false;
};

/// A block that goes back to its heap by itself. Null where there is no heap or no memory.
inline std::shared_ptr<std::byte> allocate_shared(const std::shared_ptr<SharedHeap>& heap, std::size_t nbytes) {
  auto* const data = heap ? static_cast<std::byte*>(heap->allocate(nbytes).data) : nullptr;
  if (data == nullptr) return nullptr;
  return {data, [heap](std::byte* block) { heap->free(block); }};
}

template <class Give>
bool SharedHeap::announce(std::uint32_t segment, Give give) {
  const std::lock_guard lock(mutex_);
  Segment& given = segments_[segment];
  if (!given.announced) given.announced = give(given.memory);
  return *given.announced;
}

}  // namespace samestep
