#pragma once

#include <cstddef>

namespace samestep {

/// One rank's part of a segment, in elements.
struct Chunk {
  std::size_t in_offset = 0;   ///< in the buffer of every contributor
  std::size_t out_offset = 0;  ///< in the buffer of every receiver of the result
  std::size_t count = 0;
};

/// The division of a long buffer into segments, and of each segment into chunks. Pure: all ranks compute the same.
class SegmentPlan {
 public:
  /// For `count` elements. No chunk is longer than `piece` elements (> 0).
  static SegmentPlan of_buffer(int n_ranks, std::size_t count, std::size_t piece);

  /// For `n_ranks` blocks of `block` elements, as in reduce_scatter: the chunks of rank r lie in block r, and at the
  /// same offset of its result.
  static SegmentPlan of_blocks(int n_ranks, std::size_t block, std::size_t piece);

  std::size_t segments() const { return segments_; }

  /// The chunk that `owner` reduces in a segment. The chunks of all segments and owners cover the buffer exactly once;
  /// some may be empty.
  Chunk chunk(std::size_t segment, int owner) const;

  /// The longest chunk, in elements.
  std::size_t longest() const { return longest_; }

 private:
  std::size_t n_ranks_ = 1;
  std::size_t count_ = 0;
  bool blocks_ = false;
  std::size_t segments_ = 0;
  std::size_t segment_length_ = 0;  // elements of a segment (of_buffer) or of its part in a block (of_blocks)
  std::size_t longest_ = 0;
};

}  // namespace samestep
