#include "node/staged_reduction.h"

#include <algorithm>
#include <vector>

#include "kernels/stream.h"

namespace samestep {

StagedReduction::StagedReduction(const ReductionContext& task) : context_(task) {
  constexpr std::size_t kRounding = 512;  // bytes by which a plan may round chunks up
  const auto size = static_cast<std::size_t>(task.size());
  const std::size_t share = ShmRegion::kStageBytes / size;
  const std::size_t piece = std::max<std::size_t>(1, (share > kRounding ? share - kRounding : 0) / task.itemsize());
  plan_ = task.type == CollectiveType::reduce_scatter ? SegmentPlan::of_blocks(task.size(), task.out.count, piece)
                                                      : SegmentPlan::of_buffer(task.size(), task.in.count, piece);
  piece_bytes_ = plan_.longest() * task.itemsize();
}

std::byte* StagedReduction::staged(int rank, std::size_t segment, int owner) const {
  return context_.group->region->stage(rank, segment) + static_cast<std::size_t>(owner) * piece_bytes_;
}

void StagedReduction::begin() {
  const auto staged = [](const ReductionDescriptor& posted) { return posted.is_prestaged; };
  is_prestaged_ = staged(context_.descriptor_of(context_.rank()));
  // The headers have published the segments that were prestaged. If all ranks have done that, none waits for another
  // one before it reduces the first segment.
  if (std::all_of(context_.descriptors.begin(), context_.descriptors.end(), staged)) step_ = first_segment_ = 1;
}

bool StagedReduction::work() {
  const std::size_t n_segments = plan_.segments();
  while (step_ < n_segments + 2) {
    // No other rank accesses this rank's stages before its first step or after its last.
    if (step_ != first_segment_ && !context_.all_at(step_)) return false;
    const std::size_t k = step_;
    // Before the copy in: segments k and k - 2 use the same stage.
    if (k >= 2) copy_out(k - 2);
    if (k < n_segments && !(k == 0 && is_prestaged_)) copy_in(k);
    if (k >= 1 && k <= n_segments) reduce_own(k - 1);
    context_.set_step(++step_);
  }
  return true;
}

void StagedReduction::copy_in(std::size_t segment) const {
  for (int owner = 0; owner < context_.size(); ++owner) {
    const Chunk chunk = plan_.chunk(segment, owner);
    // The owner reduces its own elements from where they are.
    if (owner == context_.rank() || chunk.count == 0) continue;
    kernels::copy(staged(context_.rank(), segment, owner),
                  static_cast<const std::byte*>(context_.in.data) + chunk.in_offset * context_.itemsize(),
                  chunk.count * context_.itemsize());
  }
}

void StagedReduction::reduce_own(std::size_t segment) const {
  const int me = context_.rank();
  const Chunk chunk = plan_.chunk(segment, me);
  if (chunk.count == 0) return;
  std::vector<kernels::Input>& inputs = context_.group->inputs;
  std::vector<void*>& outs = context_.group->outs;
  inputs.resize(static_cast<std::size_t>(context_.size()));
  outs.clear();
  for (int rank = 0; rank < context_.size(); ++rank) {
    std::byte* const lines = staged(rank, segment, me);
    const bool wants = context_.wanted_by(rank) && (rank == me || context_.type != CollectiveType::reduce_scatter);
    const std::byte* const own =
        static_cast<const std::byte*>(context_.in.data) + chunk.in_offset * context_.itemsize();
    inputs[static_cast<std::size_t>(rank)] = {rank == me ? own : lines, context_.descriptor_of(rank).factor};
    if (!wants) continue;
    outs.push_back(rank == me ? static_cast<std::byte*>(context_.out.data) + chunk.out_offset * context_.itemsize()
                              : lines);
  }
  context_.reduce(inputs, outs, chunk.count);
}

void StagedReduction::copy_out(std::size_t segment) const {
  if (context_.type == CollectiveType::reduce_scatter || !context_.wanted_by(context_.rank())) return;
  for (int step = 1; step < context_.size(); ++step) {
    const int owner = (context_.rank() + step) % context_.size();
    const Chunk chunk = plan_.chunk(segment, owner);
    if (chunk.count == 0) continue;
    kernels::copy(static_cast<std::byte*>(context_.out.data) + chunk.out_offset * context_.itemsize(),
                  staged(context_.rank(), segment, owner), chunk.count * context_.itemsize());
  }
}

}  // namespace samestep
