#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/window_plan.h"
#include "node/reduction_task.h"

namespace samestep {

/// Slices go through shared memory in a pipeline: while one window is copied in, the one before is reduced by the
/// owners of its slices, and the one before that is copied out.
///
/// An owner stores its result into the very lines that it has read, those of each contributor. So a line travels twice,
/// there and back, and is in the cache of whoever writes it: a store into lines that another processor has read costs
/// several times more.
class StagedReduction {
 public:
  explicit StagedReduction(const ReductionTask& task);

  /// This rank's part of a window into its stage. Of the first one before the ranks meet, if no operation before is
  /// under way here.
  void copy_in(std::size_t window) const;
  /// All ranks have met.
  void begin();
  /// As many steps as the other ranks allow; true at the end.
  bool work();

 private:
  void reduce_own(std::size_t window) const;
  void copy_out(std::size_t window) const;
  std::byte* staged(int rank, std::size_t window, int owner) const;

  const ReductionTask& task_;
  WindowPlan plan_;
  std::size_t piece_bytes_ = 0;
  std::uint64_t step_ = 0, first_ = 0;
  bool first_is_staged_ = false;
};

}  // namespace samestep
