#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace samestep {

/// How a group notices ranks that leave, and how it ends on all of them; see Communicator::membership. Blocks of
/// `together()` end a group as MPI_Comm_revoke of ULFM does (Bland et al., "Post-failure recovery of MPI communication
/// capability", 2013). In a group of one rank there is nothing to do.
class Membership {
 public:
  virtual ~Membership() = default;

  /// Detects peers that have died, left, or wait at the end of the block, and fails the operations that need them.
  /// Every wait does this now and then. Never blocks.
  virtual void check_peers() {}
  /// Does that, for code that waits for the ranks elsewhere, as in NCCL, which may never notice. The error of the first
  /// rank that has left, or null: PeerLostError, or StepError if it has left a block. `what`: that waits for it.
  virtual std::exception_ptr lost(const std::string& what) {
    (void)what;
    return nullptr;
  }

  /// This rank leaves the group for good. Operations of other ranks that need it fail with a StepError that
  /// names `why`, and those ranks then revoke the group, too. Operations in which this rank has already taken part
  /// complete normally. Other groups are not affected. Does not wait for other ranks.
  virtual void revoke(const std::string& why, std::uint64_t block) { (void)why, (void)block; }
  /// Whether this rank has revoked the group, or another rank has in a block that this rank is in.
  virtual bool is_revoked() { return false; }
  /// To be called once all ranks know that all have revoked the group. Frees its memory and returns true, unless the
  /// transport may still access that memory.
  virtual bool discard() { return false; }
  /// Whether the transport has let go of the memory of every operation.
  virtual bool is_discarded() const { return false; }

  /// This rank enters or leaves a block, which has a number of its own. Applies to all groups of the world.
  virtual void open_block(std::uint64_t block) { (void)block; }
  virtual void close_block(std::uint64_t block) { (void)block; }
  /// This rank waits at the end of the block. A rank that is still inside, and waits for this one in a collective that
  /// this rank has not started, revokes the group.
  virtual void announce_block_end(std::uint64_t block) { (void)block; }
};

}  // namespace samestep
