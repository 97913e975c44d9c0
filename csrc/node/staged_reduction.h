#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/segment_plan.h"
#include "node/reduction_context.h"

namespace samestep {

/// Two-shot reduction by copy-in/copy-out, as a pipeline: while one segment is copied into the stages, the one before
/// is reduced by the owners of its chunks, and the one before that is copied out.
///
/// An owner stores its result into the lines that it has read, in the stage of each contributor. So each line moves
/// twice, there and back, and is in the cache of the rank that writes it. A store into lines that another CPU has read
/// is several times slower.
class StagedReduction {
 public:
  explicit StagedReduction(const ReductionContext& task);

  /// Copies this rank's elements of a segment into its stage. The first segment may be copied before the headers are
  /// exchanged, if no earlier operation uses the stage.
  void copy_in(std::size_t segment) const;
  /// To be called when all ranks have posted.
  void begin();
  /// Makes the steps that the progress of the other ranks allows. True at the end.
  bool work();

 private:
  void reduce_own(std::size_t segment) const;
  void copy_out(std::size_t segment) const;
  std::byte* staged(int rank, std::size_t segment, int owner) const;

  const ReductionContext& context_;
  SegmentPlan plan_;
  std::size_t piece_bytes_ = 0;
  std::uint64_t step_ = 0, first_segment_ = 0;
  bool is_prestaged_ = false;
};

}  // namespace samestep
