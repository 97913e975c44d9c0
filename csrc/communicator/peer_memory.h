#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/remote_segment.h"

namespace samestep {

class SharedHeap;

/// Access to the memory of other ranks of the same host; see Communicator::peer_memory.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  /// The memory of this rank that its peers on the host can map. Null if there is none.
  virtual std::shared_ptr<SharedHeap> heap() const = 0;
  /// Allocates at least `nbytes` of it, on which operations of the group need no copies. Null if there is none.
  virtual std::shared_ptr<std::byte> allocate(std::size_t nbytes) = 0;

  /// Whether every rank of the group can read and write the memory of every other one by CMA. The same on all ranks.
  /// The functions below need it.
  virtual bool has_cma() const = 0;
  /// The address by which peers access `data`.
  virtual std::uint64_t to_remote_address(const void* data, std::size_t nbytes) const = 0;
  /// Whether it is in the heap.
  virtual bool is_shared(const void* data, std::size_t nbytes) const = 0;
  /// Copies between this rank's memory and that of `peer`, whose addresses are `remote`. False if `peer` has died; the
  /// next collective reports why. `taken`: no other rank reads these bytes, and `peer` writes them next, so this rank
  /// takes ownership of the lines.
  virtual bool read_peer(int peer, std::span<const RemoteSegment> segments, bool taken) = 0;
  virtual bool write_peer(int peer, std::span<const RemoteSegment> segments) = 0;
  /// After an error: from now on what other ranks write misses this array of this rank.
  virtual void withdraw(const void* data, std::size_t nbytes) = 0;
};

}  // namespace samestep
