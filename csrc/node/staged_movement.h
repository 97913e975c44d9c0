#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "communicator/signature.h"
#include "node/node_group.h"

namespace samestep {

/// Runs of bytes go through shared memory in a pipeline: a sender copies a window of each into its own stage while the
/// receivers copy out the ones before. All runs of the operation are equally long.
///
/// A store into lines that another processor has read costs several times more than one into lines that it has written,
/// see StagedReduction. So the only receiver of a window stores into its lines, too, and the sender of one that several
/// receive may go past the caches, which on other processors is slower. Where two ranks exchange runs each copies its
/// next window into the lines out of which it has copied the other's.
///
/// A rank's stage is its own again once all receivers have taken their last window.
class StagedMovement {
 public:
  /// `past_caches`: this rank writes windows that several receive past the caches.
  StagedMovement(NodeGroup& group, std::uint64_t sequence, Verb verb, std::size_t nbytes, bool past_caches);

  /// Can such an operation go this way? The same answer on all ranks.
  static bool carries(Verb verb, int size);
  /// Does each run go to several ranks?
  static bool several_receive(Verb verb, int size);

  void send(int peer, const std::byte* from);
  /// `first_is_staged`: the sender did so ahead.
  void receive(int peer, std::byte* into, bool first_is_staged);

  /// The first window before the ranks meet, if no operation before is under way here.
  void copy_ahead() { copy_in(0); }
  void skip_first() { first_is_staged_ = true; }
  /// As many steps as the other ranks allow; true at the end.
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
    bool first_is_staged;
  };

  void plan_windows();
  void plan_exchange();
  bool may_step() const;
  void copy_in(std::size_t window) const;
  void copy_out(std::size_t window) const;
  void exchange(std::size_t step) const;
  std::size_t length(std::size_t window) const;
  std::byte* staged(int sender, int receiver, std::size_t window) const;

  NodeGroup& group_;
  std::uint64_t sequence_;
  std::size_t nbytes_;
  bool alike_;            // whoever sends sends the same to all
  bool several_receive_;  // each window
  bool past_caches_;      // as `copy_in` writes what several receive
  bool exchanges_;        // between two ranks
  std::size_t n_lanes_ = 1, lane_nbytes_ = 0;
  std::size_t window_nbytes_ = 0, n_windows_ = 0;
  std::size_t depth_ = 0;  // windows of a lane
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::uint64_t step_ = 0;
  bool first_is_staged_ = false;
};

}  // namespace samestep
