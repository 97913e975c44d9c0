#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/deadline.h"
#include "core/remote_segment.h"

namespace samestep {

class SharedHeap;

/// A rank's access to the other ranks of its host. Ranks are numbered as on the host.
class LocalPeers {
 public:
  virtual ~LocalPeers() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Memory that `members` share, this rank among them; initially zero. Collective over them; calls with the same
  /// `number`, see GroupNumbers, come in the same order on all. Throws TimeoutError at the deadline. Thread-safe.
  virtual std::shared_ptr<std::byte> share(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                                           const Deadline& deadline) = 0;

  struct Meeting {
    std::shared_ptr<std::byte> memory;  ///< null if the members have not met
    std::vector<int> absent;            ///< at the deadline; empty if a member has given up before
  };
  /// As `share`, for members that have agreed on nothing before and may never come, each `number` once. If one gives
  /// up at its deadline, so do all that come: then they may meet under another number.
  virtual Meeting meet(std::span<const int> members, std::size_t nbytes, std::uint64_t number,
                       const Deadline& deadline) {
    return {share(members, nbytes, number, deadline), {}};
  }

  /// The address of this rank's memory for other ranks: an offset in shared memory, or an address in this process.
  virtual std::uint64_t to_remote_address(const void* data, std::size_t nbytes) = 0;
  /// Maps `peer`'s memory at an offset in shared memory into this process. Null for an address in that process.
  virtual std::byte* map_peer_memory(int peer, std::uint64_t address, std::size_t nbytes) = 0;
  static constexpr std::uint64_t kSharedAddressBit = std::uint64_t{1} << 63;  ///< set in an offset in shared memory

  /// The memory of this rank that all ranks of the host can map. May outlive this object. Null if there is none.
  virtual std::shared_ptr<SharedHeap> heap() = 0;

  /// Whether the process of this rank has ended.
  virtual bool ended(int peer) const = 0;

  /// Whether every rank can read and write every other rank's memory by CMA (process_vm_readv, process_vm_writev). The
  /// same on all ranks.
  virtual bool has_cma() const = 0;
  using Buffers = std::span<const std::span<const std::byte>>;
  /// Whether CMA cannot reach one of these buffers although `has_cma`: permissions may have changed since then, and
  /// some mappings are never accessible. Ranks post it, so that all choose another path for the operation. At most 8,
  /// none of them shared: it takes system calls.
  virtual bool hides(Buffers buffers) const { return (void)buffers, false; }
  /// Copies between this rank's memory and `peer`'s by CMA. False if the system call fails; of a write also if the gate
  /// of the peer is closed: then nothing has been written. See WriteFence.
  virtual bool read_peer(int peer, std::span<const RemoteSegment> pieces) = 0;
  virtual bool write_peer(int peer, std::uint64_t gate, std::span<const RemoteSegment> pieces) = 0;
  /// The address of a new gate of this rank; 0 if nobody writes by CMA.
  virtual std::uint64_t open_gate() = 0;
  virtual void close_gate(std::uint64_t gate) = 0;
  /// To be called when nobody will pass it any more.
  virtual void free_gate(std::uint64_t gate) = 0;
  /// Whether the process of this rank is stopped, outside any system call. False also if that is unknown.
  virtual bool is_stopped(int peer) const { return (void)peer, false; }
  bool read_peer(int peer, void* to, std::uint64_t from, std::size_t nbytes) {
    const RemoteSegment piece{static_cast<std::byte*>(to), from, nbytes};
    return nbytes == 0 || read_peer(peer, {&piece, 1});
  }
};

}  // namespace samestep
