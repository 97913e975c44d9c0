#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "node/node_group.h"

namespace samestep {

/// Copies blocks between this rank's and another rank's array in one step, through shared memory or by CMA. Both ends
/// of a block may do a part of the copy.
class SingleCopyExchange {
 public:
  struct Run {
    int peer;
    bool outgoing;
    std::byte* local;
    std::uint64_t remote;  // see LocalPeers::to_remote_address
    std::size_t nbytes;
  };

  /// `footprint`: roughly the bytes that all ranks together access.
  SingleCopyExchange(NodeGroup& group, std::size_t footprint) : group_(group), footprint_bytes_(footprint) {}

  /// Adds a block that this rank copies alone.
  void copy(const Run& run) { parts_.push_back({run, 0, run.nbytes}); }
  /// Adds a block of which this rank copies `n` of `of` equal parts, beginning with part `first`.
  void copy_parts(const Run& run, std::size_t first, std::size_t n, std::size_t of);

  /// Makes some of the copies. True once all are made.
  bool work();
  /// Number of copies made so far.
  std::uint64_t steps() const { return n_copied_; }

 private:
  struct Part {
    Run run;
    std::size_t begin, end;
  };

  void copy_chunk(const Run& run, std::size_t begin, std::size_t nbytes);

  NodeGroup& group_;
  std::size_t footprint_bytes_;
  std::vector<Part> parts_;
  std::size_t at_ = 0;  // index in parts_
  std::uint64_t n_copied_ = 0;
  bool peer_memory_lost_ = false;  // see PeerMemoryLost
};

}  // namespace samestep
