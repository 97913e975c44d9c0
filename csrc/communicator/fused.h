#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "communicator/communicator.h"

namespace samestep {

/// Collectives over many buffers in few messages, for callers that wait: small buffers are packed behind one another,
/// large ones stay where they lie. Buffers are the same in number, counts and dtypes on all ranks; whoever calls has
/// made sure of it. All are contiguous host memory, no two of them overlap.
class Fused {
 public:
  explicit Fused(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}

  /// Every buffer on every rank = root's.
  void broadcast(std::span<const Buffer> buffers, int root, const Deadline& deadline);

  /// Every buffer on every rank = the reduction over all ranks.
  void all_reduce(std::span<const Buffer> buffers, const Reduction& reduction, const Deadline& deadline);

 private:
  static constexpr std::size_t kLarge = 512 << 10;  // from here on a copy costs more than a message
  static constexpr std::size_t kTurns = 6;          // of a broadcast that is packed in turns, of so many bytes each:
  static constexpr std::size_t kShortestTurn = 64 << 10, kLongestTurn = 512 << 10;
  static constexpr std::size_t kPacked = 1 << 20;  // most bytes in one message of small buffers

  /// Nothing is packed: receivers copy from where root's buffers lie, and root copies its share to where theirs are.
  void broadcast_directly(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  /// Root packs, and the others copy from there while it packs the next part; unless its buffers lie in shared memory.
  void broadcast_in_turns(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  void broadcast_packed(std::span<const Buffer> buffers, int root, const Deadline& deadline);
  void all_reduce_packed(std::span<const Buffer> buffers, const Reduction& reduction, const Deadline& deadline);
  [[noreturn]] void meet_without(int peer, const Deadline& deadline);
  std::byte* memory();
  void run(const Call& call, const Deadline& deadline);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<std::byte> memory_;  // kPacked bytes
};

}  // namespace samestep
