#pragma once

#include <cstddef>
#include <cstdint>

#include "exchange/window_plan.h"
#include "node/reduction_task.h"

namespace samestep {

/// Slices go through shared memory in a pipeline of three stages: while one is copied in, the one before is reduced by
/// its owner, and the one before that is copied out.
class StagedReduction {
 public:
  explicit StagedReduction(const ReductionTask& task);

  /// As many steps as the other ranks allow; true at the end.
  bool work();

 private:
  bool stage_is_free() const;
  void copy_in(std::size_t window) const;
  void reduce_own(std::size_t window) const;
  void copy_out(std::size_t window) const;
  std::byte* staged(int rank, std::size_t window, int owner) const;

  const ReductionTask& task_;
  WindowPlan plan_;
  std::size_t piece_bytes_ = 0;
  std::uint64_t step_ = 0;
};

}  // namespace samestep
