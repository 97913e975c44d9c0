#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace samestep {

/// The elements [begin, end) of a buffer.
struct Range {
  std::size_t begin = 0, end = 0;
  std::size_t count() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// One step of a rank: it sends, receives, and combines or stores what it has received.
struct RecursiveStep {
  struct Transfer {
    int peer = -1;
    Range range;
  };
  /// Received elements are combined as the left or the right operand with those of this rank, or are results to store.
  enum class Use : std::uint8_t { left, right, result };

  std::vector<Transfer> out;
  std::vector<Transfer> in;  ///< at most one if it is combined
  Use use = Use::result;
  bool finishes = false;  ///< afterwards the range holds the result over all ranks
};

/// The steps of one rank in an allreduce by recursive halving, about 2 log2(n): it exchanges one half of what it still
/// holds with the ranks at distance 1, 2, 4, ..., and then the results in the reverse order. If `scatter_first` is
/// false, by recursive doubling: it exchanges everything at each step and needs no results: half the steps, log2(n)
/// times the bytes.
///
/// Sums are in pairwise order of rank, ((0+1)+(2+3))+..., for any n. Ranks form blocks whose sizes are powers of two,
/// the largest first. Each block reduces within itself, then each smaller block sends its sums to the next larger one,
/// which adds them as right operands; results return over the same steps. Pure: the plans of all ranks fit each other.
/// Each pair of ranks exchanges at most one message in each direction before the results, and one of results.
///
/// Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), 49-66, for powers of two; Traeff and Ripke, IPDPS 2005,
/// for the blocks.
class RecursivePlan {
 public:
  /// The plan of `rank` among `n_ranks` >= 1, for the elements `whole`.
  RecursivePlan(int n_ranks, int rank, Range whole, bool scatter_first);

  const std::vector<RecursiveStep>& steps() const { return steps_; }

  /// Elements that are received to be combined, in all steps together.
  std::size_t room() const;

 private:
  struct Block {
    int first = 0, size = 0;
  };
  /// With halving: the part whose result rank `index` of a block of `size` ranks computes.
  Range part(int size, int index) const;
  void combine_within_block();
  void combine_blocks();
  void distribute();

  Range whole_;
  bool scatter_first_;
  Block larger_, own_, smaller_;  // the block of this rank, and the next larger and smaller ones, if any
  int index_ = 0;                 // of this rank in its block
  std::vector<RecursiveStep> steps_;
};

/// The length of the longest chain of messages, and the number of messages of the busiest rank, in a RecursivePlan.
struct RecursiveCost {
  int rounds = 0, messages = 0;
};
RecursiveCost recursive_cost(int n_ranks, bool scatter_first);

}  // namespace samestep
