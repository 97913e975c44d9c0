#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace samestep {

/// Elements of a buffer, from `begin` up to `end`.
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// What a rank does at one time: it sends, it receives, and puts what it has received where it belongs.
struct HalvingStep {
  struct Transfer {
    int peer = -1;
    Range range;
  };
  /// What becomes of what is received: it is added before what this rank holds of the range, or behind it. Or the step
  /// hands out results.
  enum class Use : std::uint8_t { before, behind, result };

  std::vector<Transfer> out;
  std::vector<Transfer> in;  ///< at most one where it is added
  Use use = Use::result;
  bool finishes = false;  ///< what is added up then is the sum over all ranks
};

/// An allreduce in some 2 log2(n) steps, in each of which a rank exchanges messages with one partner: with the ranks at
/// distance 1, 2, 4, ..., halves of what it still holds; then the results, backwards. Where `halves` is false all of
/// it is exchanged each time and nothing has to come back: half the steps, and log2(n) times the bytes.
///
/// Sums are in pairwise order of rank, ((0+1)+(2+3))+..., for any n: n is a sum of powers of two, ranks form blocks of
/// these sizes, the largest first; each adds up for itself, the sums of smaller blocks are added behind those of the
/// next larger one, piece by piece, and results go the other way. Pure: all ranks compute plans that fit each other.
/// Between two ranks at most one message goes each way before the results, and one of results.
///
/// Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), 49-66, for powers of two; Traeff and Ripke, IPDPS 2005,
/// for the blocks.
class HalvingPlan {
 public:
  /// Of `rank` among `n_ranks` >= 1, for elements `whole`.
  HalvingPlan(int n_ranks, int rank, Range whole, bool halves);

  const std::vector<HalvingStep>& steps() const { return steps_; }

  /// Elements received to be added up, those of all steps together.
  std::size_t room() const;

 private:
  struct Block {
    int first = 0, size = 0;
  };
  /// `index` of a block of `size` ranks finishes this part, where parts are halved.
  Range part(int size, int index) const;
  void add_up_in_block();
  void add_up_blocks();
  void hand_out();

  Range whole_;
  bool halves_;
  Block larger_, own_, smaller_;  // the block of this rank, and those beside it in size, if any
  int index_ = 0;                 // of this rank in its block
  std::vector<HalvingStep> steps_;
};

/// Messages that follow one another and messages that the busiest rank sends in a HalvingPlan.
struct HalvingCost {
  int rounds = 0, messages = 0;
};
HalvingCost halving_cost(int n_ranks, bool halves);

}  // namespace samestep
