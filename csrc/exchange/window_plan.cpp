#include "exchange/window_plan.h"

#include <algorithm>

namespace samestep {
namespace {

constexpr std::size_t kGrain = 16;  // chunks start at multiples of it, so that loops stay aligned

constexpr std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
constexpr std::size_t round_up(std::size_t a) { return divide_up(a, kGrain) * kGrain; }

}  // namespace

WindowPlan WindowPlan::of_buffer(int n_ranks, std::size_t count, std::size_t piece) {
  WindowPlan plan;
  plan.n_ranks_ = static_cast<std::size_t>(n_ranks);
  plan.count_ = count;
  if (count == 0) return plan;
  const std::size_t windows = divide_up(count, plan.n_ranks_ * piece);
  plan.window_length_ = round_up(divide_up(count, windows));
  plan.windows_ = divide_up(count, plan.window_length_);
  plan.longest_ = round_up(divide_up(plan.window_length_, plan.n_ranks_));
  return plan;
}

WindowPlan WindowPlan::of_blocks(int n_ranks, std::size_t block, std::size_t piece) {
  WindowPlan plan;
  plan.n_ranks_ = static_cast<std::size_t>(n_ranks);
  plan.count_ = block;
  plan.blocks_ = true;
  if (block == 0) return plan;
  plan.window_length_ = round_up(divide_up(block, divide_up(block, piece)));
  plan.windows_ = divide_up(block, plan.window_length_);
  plan.longest_ = plan.window_length_;
  return plan;
}

Chunk WindowPlan::chunk(std::size_t window, int owner) const {
  const auto rank = static_cast<std::size_t>(owner);
  const std::size_t begin = window * window_length_;
  const std::size_t end = std::min(count_, begin + window_length_);
  if (blocks_) return {rank * count_ + begin, begin, end - begin};
  const std::size_t first = std::min(end, begin + rank * longest_);
  const std::size_t last = std::min(end, first + longest_);
  return {first, first, last - first};
}

}  // namespace samestep
