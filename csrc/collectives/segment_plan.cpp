#include "collectives/segment_plan.h"

#include <algorithm>

namespace samestep {
namespace {

constexpr std::size_t kChunkGrain = 16;  // chunks start at multiples of it, so that vector loops stay aligned

constexpr std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
constexpr std::size_t round_up(std::size_t a) { return divide_up(a, kChunkGrain) * kChunkGrain; }

}  // namespace

SegmentPlan SegmentPlan::of_buffer(int n_ranks, std::size_t count, std::size_t piece) {
  SegmentPlan plan;
  plan.n_ranks_ = static_cast<std::size_t>(n_ranks);
  plan.count_ = count;
  if (count == 0) return plan;
  const std::size_t n_segments = divide_up(count, plan.n_ranks_ * piece);
  plan.segment_length_ = round_up(divide_up(count, n_segments));
  // Again, because the length has been rounded up: fewer segments may be enough.
  plan.segments_ = divide_up(count, plan.segment_length_);
  plan.longest_ = round_up(divide_up(plan.segment_length_, plan.n_ranks_));
  return plan;
}

SegmentPlan SegmentPlan::of_blocks(int n_ranks, std::size_t block, std::size_t piece) {
  SegmentPlan plan;
  plan.n_ranks_ = static_cast<std::size_t>(n_ranks);
  plan.count_ = block;
  plan.blocks_ = true;
  if (block == 0) return plan;
  plan.segment_length_ = round_up(divide_up(block, divide_up(block, piece)));
  plan.segments_ = divide_up(block, plan.segment_length_);
  plan.longest_ = plan.segment_length_;
  return plan;
}

Chunk SegmentPlan::chunk(std::size_t segment, int owner) const {
  const auto rank = static_cast<std::size_t>(owner);
  const std::size_t begin = segment * segment_length_;
  const std::size_t end = std::min(count_, begin + segment_length_);
  if (blocks_) return {rank * count_ + begin, begin, end - begin};
  // The last segment may be too short for all owners: then the chunks of the last ones are empty.
  const std::size_t first = std::min(end, begin + rank * longest_);
  const std::size_t last = std::min(end, first + longest_);
  return {first, first, last - first};
}

}  // namespace samestep
