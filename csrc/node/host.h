#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/deadline.h"
#include "core/piece.h"

namespace samestep {

class SharedHeap;

/// What a rank can do with the other ranks of its host, beyond the memory they share. Ranks are those of the
/// whole host.
class Host {
 public:
  virtual ~Host() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Memory, zero at first, that `members` (of whom this rank is one) have in common. Collective over them, in the same
  /// order on all; throws TimeoutError at the deadline.
  virtual std::shared_ptr<std::byte> share(std::span<const int> members, std::size_t nbytes,
                                           const Deadline& deadline) = 0;

  /// Where memory of this rank lies, as other ranks understand it: a place in memory that all share, or an address
  /// in this process.
  virtual std::uint64_t place_of(const void* data, std::size_t nbytes) = 0;
  /// The memory at a place of `peer`'s, as this process sees it. Null for an address in that process.
  virtual std::byte* at(int peer, std::uint64_t place, std::size_t nbytes) = 0;
  static constexpr std::uint64_t kShared = std::uint64_t{1} << 63;  ///< the bit of a place in shared memory

  /// Memory of this rank that all ranks of the host can reach. It may outlive the host. Null where there is none.
  virtual std::shared_ptr<SharedHeap> heap() = 0;

  /// Has the process of this rank ended?
  virtual bool ended(int peer) const = 0;

  /// May every rank read and write every other rank's memory through the kernel? The same answer on all ranks.
  virtual bool reaches_memory() const = 0;
  /// Copies between this rank's memory and `peer`'s. False if the kernel refuses.
  virtual bool pull(int peer, std::span<const Piece> pieces) = 0;
  virtual bool push(int peer, std::span<const Piece> pieces) = 0;
  bool pull(int peer, void* to, std::uint64_t from, std::size_t nbytes) {
    const Piece piece{static_cast<std::byte*>(to), from, nbytes};
    return nbytes == 0 || pull(peer, {&piece, 1});
  }
  bool push(int peer, std::uint64_t to, const void* from, std::size_t nbytes) {
    const Piece piece{static_cast<std::byte*>(const_cast<void*>(from)), to, nbytes};
    return nbytes == 0 || push(peer, {&piece, 1});
  }
};

}  // namespace samestep
