#include "exchange/halving_plan.h"

#include <algorithm>
#include <bit>

namespace samestep {
namespace {

constexpr std::size_t kGrain = 16;  // halves start at multiples of it, so that loops stay aligned

Range half(Range range, bool upper) {
  const std::size_t length = (range.count() / 2 + kGrain - 1) / kGrain * kGrain;
  const std::size_t middle = range.begin + std::min(range.count(), length);
  return upper ? Range{middle, range.end} : Range{range.begin, middle};
}

int largest_power(int n) { return n == 0 ? 0 : static_cast<int>(std::bit_floor(static_cast<unsigned>(n))); }
int log2_of(int power) { return std::countr_zero(static_cast<unsigned>(power)); }

void add_to(std::vector<HalvingStep::Transfer>& transfers, int peer, Range range) {
  if (range.count() != 0) transfers.push_back({peer, range});
}

}  // namespace

HalvingPlan::HalvingPlan(int n_ranks, int rank, Range whole, bool halves) : whole_(whole), halves_(halves) {
  own_ = {0, largest_power(n_ranks)};
  while (rank >= own_.first + own_.size) {
    larger_ = own_;
    own_.first += own_.size;
    own_.size = largest_power(n_ranks - own_.first);
  }
  smaller_.first = own_.first + own_.size;
  smaller_.size = largest_power(n_ranks - smaller_.first);
  index_ = rank - own_.first;
  add_up_in_block();
  add_up_blocks();
  hand_out();
}

Range HalvingPlan::part(int size, int index) const {
  Range range = whole_;
  for (int bit = 1; halves_ && bit < size; bit *= 2) range = half(range, (index & bit) != 0);
  return range;
}

void HalvingPlan::add_up_in_block() {
  for (int bit = 1; bit < own_.size; bit *= 2) {
    const bool upper = (index_ & bit) != 0;
    const int partner = own_.first + (index_ ^ bit);
    HalvingStep& step = steps_.emplace_back();
    step.use = upper ? HalvingStep::Use::before : HalvingStep::Use::behind;
    add_to(step.out, partner, part(2 * bit, index_ ^ bit));
    add_to(step.in, partner, part(2 * bit, index_));
  }
}

void HalvingPlan::add_up_blocks() {
  if (smaller_.size != 0) {
    HalvingStep& step = steps_.emplace_back();
    step.use = HalvingStep::Use::behind;
    add_to(step.in, smaller_.first + index_ % smaller_.size, part(own_.size, index_));
  }
  if (own_.first == 0 && !steps_.empty()) steps_.back().finishes = true;
  if (own_.first == 0) return;
  HalvingStep& step = steps_.emplace_back();
  step.use = HalvingStep::Use::behind;
  for (int peer = index_; peer < larger_.size; peer += own_.size) {
    add_to(step.out, larger_.first + peer, part(larger_.size, peer));
  }
}

void HalvingPlan::hand_out() {
  if (own_.first != 0) {
    HalvingStep& step = steps_.emplace_back();
    const int last = halves_ ? larger_.size : index_ + 1;
    for (int peer = index_; peer < last; peer += own_.size) {
      add_to(step.in, larger_.first + peer, part(larger_.size, peer));
    }
  }
  HalvingStep step;
  if (smaller_.size != 0 && (halves_ || index_ < smaller_.size)) {
    add_to(step.out, smaller_.first + index_ % smaller_.size, part(own_.size, index_));
  }
  for (int bit = own_.size / 2; halves_ && bit > 0; bit /= 2) {
    const int partner = own_.first + (index_ ^ bit);
    add_to(step.out, partner, part(2 * bit, index_));
    add_to(step.in, partner, part(2 * bit, index_ ^ bit));
    steps_.push_back(std::move(step));
    step = {};
  }
  if (!step.out.empty()) steps_.push_back(std::move(step));
}

std::size_t HalvingPlan::room() const {
  std::size_t room = 0;
  for (const HalvingStep& step : steps_) {
    if (step.use == HalvingStep::Use::result) continue;
    for (const HalvingStep::Transfer& from : step.in) room += from.range.count();
  }
  return room;
}

HalvingCost halving_cost(int n_ranks, bool halves) {
  const int turns = halves ? 2 : 1;
  HalvingCost cost;
  for (int left = n_ranks, larger = 0; left > 0;) {
    const int own = largest_power(left), smaller = largest_power(left - own);
    const int to_larger = larger / own, to_smaller = smaller == 0 ? 0 : 1;
    cost.messages = std::max(cost.messages, turns * log2_of(own) + to_larger + to_smaller);
    // Smaller blocks have fewer steps: nobody waits for their sums, and halved results come in time for them too.
    cost.rounds += larger == 0 ? turns * log2_of(own) : (halves ? 0 : 1);
    larger = own;
    left -= own;
  }
  return cost;
}

}  // namespace samestep
