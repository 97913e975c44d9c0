#include "collectives/recursive_plan.h"

#include <algorithm>
#include <bit>

namespace samestep {
namespace {

constexpr std::size_t kSplitGrain = 16;  // split points are multiples of it, so that vector loops stay aligned

Range half(Range range, bool upper) {
  const std::size_t length = (range.count() / 2 + kSplitGrain - 1) / kSplitGrain * kSplitGrain;
  const std::size_t middle = range.begin + std::min(range.count(), length);
  return upper ? Range{middle, range.end} : Range{range.begin, middle};
}

int largest_power(int n) { return n == 0 ? 0 : static_cast<int>(std::bit_floor(static_cast<unsigned>(n))); }
int log2_of(int power) { return std::countr_zero(static_cast<unsigned>(power)); }

void add_to(std::vector<RecursiveStep::Transfer>& transfers, int peer, Range range) {
  if (range.count() != 0) transfers.push_back({peer, range});
}

}  // namespace

RecursivePlan::RecursivePlan(int n_ranks, int rank, Range whole, bool scatter_first)
    : whole_(whole), scatter_first_(scatter_first) {
  // The blocks are the binary digits of the number of ranks, the highest first: 13 ranks form blocks of 8, 4 and 1.
  own_ = {0, largest_power(n_ranks)};
  while (rank >= own_.first + own_.size) {
    larger_ = own_;
    own_.first += own_.size;
    own_.size = largest_power(n_ranks - own_.first);
  }
  smaller_.first = own_.first + own_.size;
  smaller_.size = largest_power(n_ranks - smaller_.first);
  index_ = rank - own_.first;
  combine_within_block();
  combine_blocks();
  distribute();
}

Range RecursivePlan::part(int size, int index) const {
  // At distance 1, 2, 4, ... a rank keeps the lower or the upper part of its range by that bit of its index. So ranks
  // of two blocks whose indices agree in the low bits hold nested parts.
  Range range = whole_;
  for (int bit = 1; scatter_first_ && bit < size; bit *= 2) range = half(range, (index & bit) != 0);
  return range;
}

void RecursivePlan::combine_within_block() {
  for (int bit = 1; bit < own_.size; bit *= 2) {
    // Distances double, other than in the textbook's recursive halving: a step then combines two neighbouring runs of
    // ranks. What comes from the lower ranks is the left operand, which gives the pairwise order.
    const bool upper = (index_ & bit) != 0;
    const int partner = own_.first + (index_ ^ bit);
    RecursiveStep& step = steps_.emplace_back();
    step.use = upper ? RecursiveStep::Use::left : RecursiveStep::Use::right;
    add_to(step.out, partner, part(2 * bit, index_ ^ bit));
    add_to(step.in, partner, part(2 * bit, index_));
  }
}

void RecursivePlan::combine_blocks() {
  if (smaller_.size != 0) {
    RecursiveStep& step = steps_.emplace_back();
    step.use = RecursiveStep::Use::right;
    // That rank has the sums of the smaller block for a range that contains this one; other ranks of this block get the
    // remaining parts of it. Its ranks come after those of this block, so the sums are the right operand.
    add_to(step.in, smaller_.first + index_ % smaller_.size, part(own_.size, index_));
  }
  // The sums over all ranks end in the first block. The other blocks pass theirs on, and get results back.
  if (own_.first == 0 && !steps_.empty()) steps_.back().finishes = true;
  if (own_.first == 0) return;
  RecursiveStep& step = steps_.emplace_back();
  step.use = RecursiveStep::Use::right;
  for (int peer = index_; peer < larger_.size; peer += own_.size) {
    add_to(step.out, larger_.first + peer, part(larger_.size, peer));
  }
}

void RecursivePlan::distribute() {
  if (own_.first != 0) {
    RecursiveStep& step = steps_.emplace_back();
    // With doubling every rank of the larger block has all results, so one of them is enough.
    const int last = scatter_first_ ? larger_.size : index_ + 1;
    for (int peer = index_; peer < last; peer += own_.size) {
      add_to(step.in, larger_.first + peer, part(larger_.size, peer));
    }
  }
  RecursiveStep step;
  // Results for the smaller block leave in the first step of the distribution: this rank's own part is finished by
  // then, and the smaller block wants nothing more.
  if (smaller_.size != 0 && (scatter_first_ || index_ < smaller_.size)) {
    add_to(step.out, smaller_.first + index_ % smaller_.size, part(own_.size, index_));
  }
  for (int bit = own_.size / 2; scatter_first_ && bit > 0; bit /= 2) {
    const int partner = own_.first + (index_ ^ bit);
    add_to(step.out, partner, part(2 * bit, index_));
    add_to(step.in, partner, part(2 * bit, index_ ^ bit));
    steps_.push_back(std::move(step));
    step = {};
  }
  if (!step.out.empty()) steps_.push_back(std::move(step));
}

std::size_t RecursivePlan::room() const {
  std::size_t room = 0;
  for (const RecursiveStep& step : steps_) {
    if (step.use == RecursiveStep::Use::result) continue;
    for (const RecursiveStep::Transfer& from : step.in) room += from.range.count();
  }
  return room;
}

RecursiveCost recursive_cost(int n_ranks, bool scatter_first) {
  const int passes = scatter_first ? 2 : 1;
  RecursiveCost cost;
  for (int left = n_ranks, larger = 0; left > 0;) {
    const int own = largest_power(left), smaller = largest_power(left - own);
    const int to_larger = larger / own, to_smaller = smaller == 0 ? 0 : 1;
    cost.messages = std::max(cost.messages, passes * log2_of(own) + to_larger + to_smaller);
    // Smaller blocks have fewer steps, so no rank waits for their sums, and their results do not lengthen the chain.
    cost.rounds += larger == 0 ? passes * log2_of(own) : (scatter_first ? 0 : 1);
    larger = own;
    left -= own;
  }
  return cost;
}

}  // namespace samestep
