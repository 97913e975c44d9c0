#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "os/shared_memory.h"
#include "process/fork_listener.h"
#include "shm/block_pool.h"

namespace samestep {

/// A heap that other processes can map: segments of shared memory, cut into blocks that are reused. Pages are
/// populated when a block is first allocated, not while it is used.
///
/// After a fork the child has a copy-on-write view: its writes stay private, it sees the parent's writes to pages that
/// it has not written, and `allocate` returns null in it. The parent does not reuse blocks that the child sees until
/// the child has ended or called exec.
///
/// Thread-safe. No call throws.
class SharedHeap final : private ForkListener {
 public:
  /// Pages are populated and released in parts of so many bytes.
  static constexpr std::size_t kPart = 64 << 10;

  SharedHeap();
  ~SharedHeap() override;

  struct Spot {
    std::uint32_t segment;
    std::uint64_t offset;
  };
  struct Usage {
    BlockPool::Usage blocks;
    std::size_t present = 0;   ///< populated bytes
    std::size_t segments = 0;  ///< their number never decreases
  };
  struct Block {
    void* data = nullptr;
    bool is_zero = false;  ///< else it holds old data
  };

  /// Allocates at least `nbytes`, page-aligned; null if no memory is left.
  Block allocate(std::size_t nbytes);
  /// Frees a block. False, without effect, if no block in use begins at `data`.
  bool free(void* data);
  /// Size of the block in use that begins at `data`, else 0.
  std::size_t size_of(const void* data) const;

  /// The segment and offset of a range, if it lies in one segment.
  std::optional<Spot> find(const void* data, std::size_t nbytes) const;
  /// Takes a range out of the reach of other processes: from now on they store into other pages. It keeps what it
  /// holds, belongs to no segment, and is not used again when its block is freed.
  void withdraw(const void* data, std::size_t nbytes);
  /// Calls `give(const SharedMemory&) -> bool` at the first call for a segment. Returns the result of that first call.
  template <class Give>
  bool publish(std::uint32_t segment, Give give);

  /// `limit`: the heap populates at most so many bytes. `keep`: if more than so many populated bytes are free, pages
  /// are returned to the system.
  void set_bounds(std::size_t limit, std::size_t keep);
  Usage usage();

 private:
  struct Segment {
    SharedMemory memory;
    std::vector<char> present;      // by part, 0 or 1; bytes are searched faster than bits
    std::optional<bool> published;  // the result of `give`
  };
  /// A child. It is alive as long as the other end of this pipe is open.
  struct Child {
    std::uint32_t number;
    Fd alive;
  };

  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override;
  void after_fork_in_child() noexcept override;

  bool may_own(const void* data) const;
  std::optional<std::uint64_t> locate(const void* data) const;
  std::byte* at(std::uint64_t handle) const;
  bool is_withdrawn(std::uint64_t handle, std::size_t nbytes) const;
  std::optional<std::uint64_t> take(std::size_t nbytes);
  bool grow(std::size_t nbytes);
  bool make_present(std::uint64_t handle, std::size_t nbytes, bool& was_absent);
  std::size_t needed() const;
  std::size_t spare() const;
  void trim(std::size_t to);
  void look_after_children();

  mutable std::mutex mutex_;
  BlockPool pool_;
  std::vector<Segment> segments_;
  std::map<std::uint64_t, std::uint64_t> withdrawn_;  // begin and end of whole pages, as handles
  std::atomic<std::uintptr_t> lowest_ = std::numeric_limits<std::uintptr_t>::max();
  std::atomic<std::uintptr_t> highest_ = 0;
  std::size_t mapped_ = 0, present_ = 0;
  std::size_t limit_ = std::numeric_limits<std::size_t>::max();
  std::size_t keep_ = std::size_t{1} << 30;
  std::size_t trim_from_ = keep_;
  std::vector<Child> children_;
  std::pair<Fd, Fd> lifeline_;  // of the child that is being forked
  bool is_child_ = false;
};

/// A block that returns to its heap when the last pointer is dropped. Null if there is no heap or no memory.
inline std::shared_ptr<std::byte> allocate_shared(const std::shared_ptr<SharedHeap>& heap, std::size_t nbytes) {
  auto* const data = heap ? static_cast<std::byte*>(heap->allocate(nbytes).data) : nullptr;
  if (data == nullptr) return nullptr;
  return {data, [heap](std::byte* block) { heap->free(block); }};
}

template <class Give>
bool SharedHeap::publish(std::uint32_t segment, Give give) {
  const std::lock_guard lock(mutex_);
  Segment& given = segments_[segment];
  if (!given.published) given.published = give(given.memory);
  return *given.published;
}

}  // namespace samestep
