#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "communicator/signature.h"
#include "node/node_group.h"

namespace samestep {

/// Copy-in/copy-out: blocks pass through shared memory in a pipeline. A sender copies a segment of each block into its
/// stage while the receivers copy out the segments before. All blocks of the operation have the same length.
///
/// On AMD a store into cache lines that another CPU has read is several times slower than one into lines that it has
/// written (see StagedReduction). So the only reader of a segment takes ownership of its lines. A sender with several
/// readers may use non-temporal stores, which are slower on other processors. Two ranks that exchange blocks each copy
/// their next segment into the lines from which they have copied the other's.
///
/// A rank may reuse its stage once all receivers have copied out their last segment.
class StagedExchange {
 public:
  /// `non_temporal`: this rank writes segments that several ranks read with non-temporal stores.
  StagedExchange(NodeGroup& group, std::uint64_t sequence, CollectiveType verb, std::size_t nbytes, bool non_temporal);

  /// Whether collectives of this type can be staged. The same on all ranks.
  static bool supports(CollectiveType verb, int size);
  /// Whether several ranks read each block.
  static bool has_several_readers(CollectiveType verb, int size);

  void send(int peer, const std::byte* from);
  void receive(int peer, std::byte* into);
  /// Makes the steps that the progress of the other ranks allows. True at the end.
  bool work();
  std::uint64_t steps() const { return step_; }

 private:
  struct Outgoing {
    int peer;
    const std::byte* from;
  };
  struct Incoming {
    int peer;
    std::byte* into;
  };

  void plan_segments();
  void plan_exchange();
  bool may_step() const;
  void copy_in(std::size_t segment) const;
  void copy_out(std::size_t segment) const;
  void swap(std::size_t step) const;
  std::size_t length(std::size_t segment) const;
  std::byte* staged(int sender, int receiver, std::size_t segment) const;

  NodeGroup& group_;
  std::uint64_t sequence_;
  std::size_t nbytes_;
  bool same_to_all_;          // a sender sends the same to all
  bool has_several_readers_;  // of each segment
  bool non_temporal_;         // stores of `copy_in`, if there are several readers
  bool is_two_rank_swap_;     // two ranks exchange blocks
  std::size_t n_lanes_ = 1, lane_nbytes_ = 0;
  std::size_t segment_nbytes_ = 0, n_segments_ = 0;
  std::size_t depth_ = 0;  // segments of a lane
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::uint64_t step_ = 0;
};

}  // namespace samestep
