#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shm/local_peers.h"

namespace samestep {

/// Keeps the ranks of a group out of this rank's memory once it has left the group: a rank that was stopped in the
/// middle of an operation may go on at any time (docs/design/0018).
///
/// Every write by CMA goes through a fence, which counts the writes that each rank has begun and ended, and passes the
/// gate of the target. Stores into shared memory pass no gate: an array that peers may store into is withdrawn.
class WriteFence {
 public:
  static std::size_t nbytes_for(std::size_t n_ranks) { return n_ranks * sizeof(Words); }

  /// `members`: the ranks of the group on this host; `index`: of this rank among them. `words`: memory that they share,
  /// initially zero. To be made before this rank posts an address.
  WriteFence(std::shared_ptr<LocalPeers> peers, std::vector<int> members, std::size_t index,
             std::shared_ptr<std::byte> words);
  WriteFence(const WriteFence&) = delete;
  WriteFence& operator=(const WriteFence&) = delete;
  ~WriteFence();

  /// Writes into the memory of member `index` by CMA. False if that rank has ended or has closed its fence.
  bool write(std::size_t index, std::span<const RemoteSegment> pieces);
  bool write(std::size_t index, std::uint64_t to, const void* from, std::size_t nbytes);

  /// This rank takes no part in operations from `first_absent` on: others must not access its memory in them.
  void leave(std::uint64_t first_absent);
  /// Whether all members take part in this operation. Where headers are exchanged in shared memory, those tell.
  bool all_present(std::uint64_t sequence) const;

  /// From now on no member writes into this rank's memory by CMA. Waits for writes in progress to end.
  void close();
  /// From now on stores of other ranks into this array, if it is in shared memory, miss it.
  void withdraw(const void* data, std::size_t nbytes);

 private:
  /// Of a rank, which alone writes them.
  struct alignas(64) Words {
    std::atomic<std::uint64_t> gate;          // its address; does not change
    std::atomic<std::uint64_t> begun, ended;  // writes into other ranks' memory
    std::atomic<std::uint64_t> left;          // the first operation without the rank, plus one; 0 if it has not left
  };

  std::shared_ptr<LocalPeers> peers_;
  std::vector<int> members_;
  std::size_t index_;
  std::shared_ptr<std::byte> memory_;
  Words* words_;
  bool is_closed_ = false;
};

}  // namespace samestep
