#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kernels/reduce.h"
#include "node/arena.h"
#include "node/host.h"
#include "node/line_meeting.h"
#include "node/mailbox.h"
#include "node/way_choice.h"

namespace samestep {

/// What the operations of one group of ranks of a host have in common. All ranks of the group hold the same numbers.
struct NodeGroup {
  std::shared_ptr<Arena> arena;
  std::shared_ptr<Host> host;
  std::vector<int> members;  ///< by rank of the group: rank on the host
  int rank = 0;
  LineMeeting* meeting = nullptr;
  Mailbox* mailbox = nullptr;

  /// What the arena's shared counters of each slot show once all operations before are over.
  std::array<std::uint64_t, Arena::kSlots> claimed{};
  std::array<std::uint64_t, Arena::kSlots> finished{};
  std::map<Verb, WayChoice> ways;

  // For a moment, kept for their memory:
  std::vector<std::byte> bounce;       ///< what is pulled from other ranks
  std::vector<kernels::Input> inputs;  ///< of a chunk
  std::vector<void*> outs;             ///< of a chunk
  std::vector<int> pushed;             ///< ranks to which a chunk's result goes through the kernel

  int member(int of_group) const { return members[static_cast<std::size_t>(of_group)]; }
};

/// A rank's memory cannot be reached any more. It may have gone because of another one: the operation that meets this
/// waits until ends and farewells tell who left first.
struct Unreachable {};

/// Which way an allreduce takes; the crossings that were measured. All ranks see the same.
struct Crossings {
  /// From this size on ranks announce where their buffers are,
  static constexpr std::size_t kPostedFrom = 8 << 10;
  /// and those in memory that all share are reduced in place.
  static constexpr std::size_t shared_from(bool oversubscribed) { return oversubscribed ? 20 << 10 : kPostedFrom; }
  /// Up to this size every rank reads the elements of all others and reduces them for itself.
  static constexpr std::size_t together_to(int size) {
    return (64 << 10) / static_cast<std::size_t>(std::max(size, 4));
  }
  /// More ranks than this have too small a share of a stage; without the kernel's help they use it nevertheless.
  static constexpr int kMostStaged = 128;
  /// What one rank takes at a time.
  static constexpr std::size_t kChunkBytes = 128 << 10;
};

}  // namespace samestep
