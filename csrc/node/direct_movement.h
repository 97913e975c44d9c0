#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "node/node_group.h"

namespace samestep {

/// Runs of bytes that this rank copies straight out of another rank's buffer or into it, through memory that all share
/// or through the kernel. Both ends of a run may take part.
class DirectMovement {
 public:
  struct Run {
    int peer;
    bool outgoing;
    std::byte* mine;
    std::uint64_t theirs;  // see Host::place_of
    std::size_t nbytes;
  };

  /// `touched`: bytes of all ranks, about, that take part.
  DirectMovement(NodeGroup& group, std::size_t touched) : group_(group), touched_(touched) {}

  /// This rank copies all of it.
  void copy(const Run& run) { parts_.push_back({run, 0, run.nbytes}); }
  /// It copies `n` of `of` equal parts, beginning with the one that has this number.
  void copy_parts(const Run& run, std::size_t first, std::size_t n, std::size_t of);

  /// Some of it; true once this rank has copied all it has to.
  bool work();
  /// Copies made so far.
  std::uint64_t steps() const { return n_copied_; }

 private:
  struct Part {
    Run run;
    std::size_t begin, end;
  };

  void copy_chunk(const Run& run, std::size_t begin, std::size_t nbytes);

  NodeGroup& group_;
  std::size_t touched_;
  std::vector<Part> parts_;
  std::size_t at_ = 0;  // of parts_
  std::uint64_t n_copied_ = 0;
  bool stuck_ = false;  // for good, see Unreachable
};

}  // namespace samestep
