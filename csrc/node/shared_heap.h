#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "os/shared_memory.h"

namespace samestep {

/// A process's memory that other processes can map: segments of shared memory, cut into blocks of a few sizes
/// that are used again. Pages are made present when a block is first cut, not while it is used.
///
/// Thread-safe.
class SharedHeap {
 public:
  /// `announce` is called with each new segment and its number before any block of it is handed out.
  using Announce = std::function<void(std::uint32_t number, const SharedMemory& segment)>;
  explicit SharedHeap(Announce announce) : announce_(std::move(announce)) {}

  struct Spot {
    std::uint32_t segment;
    std::uint64_t offset;
  };

  /// A block of at least `nbytes`, 64-byte aligned; null if the system has no memory left.
  void* allocate(std::size_t nbytes);
  /// `data` from `allocate`.
  void free(void* data);
  /// Where a range lies, if it lies in one segment.
  std::optional<Spot> find(const void* data, std::size_t nbytes) const;

 private:
  struct Segment {
    SharedMemory memory;
    std::size_t used = 0;
  };
  static std::size_t class_of(std::size_t nbytes);
  void* cut(std::size_t nbytes);

  mutable std::mutex mutex_;
  Announce announce_;
  std::vector<Segment> segments_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size
  std::map<void*, std::size_t> in_use_;
};

}  // namespace samestep
