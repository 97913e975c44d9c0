#pragma once

#include <cstddef>

namespace samestep {

/// One rank's part of a window, in elements.
struct Chunk {
  std::size_t in_offset = 0;   ///< where every contributor has it
  std::size_t out_offset = 0;  ///< where every receiver of the result puts it
  std::size_t count = 0;
};

/// How a long buffer is cut into windows and chunks. Pure: all ranks compute the same.
class WindowPlan {
 public:
  /// Of `count` elements, cut so that no chunk is longer than `piece` elements (> 0).
  static WindowPlan of_buffer(int n_ranks, std::size_t count, std::size_t piece);

  /// Of n_ranks blocks of `block` elements, where chunks of rank r lie in block r and land at the same
  /// place of a result of `block` elements (reduce_scatter).
  static WindowPlan of_blocks(int n_ranks, std::size_t block, std::size_t piece);

  std::size_t windows() const { return windows_; }

  /// The chunk that `owner` reduces in a window. The chunks of all windows and owners cover the buffer
  /// exactly once; some may be empty.
  Chunk chunk(std::size_t window, int owner) const;

  /// The longest chunk, in elements.
  std::size_t longest() const { return longest_; }

 private:
  std::size_t n_ranks_ = 1;
  std::size_t count_ = 0;
  bool blocks_ = false;
  std::size_t windows_ = 0;
  std::size_t window_length_ = 0;  // elements of a window (of_buffer) or of a block's part (of_blocks)
  std::size_t longest_ = 0;
};

}  // namespace samestep
