#include "node/staged_reduction.h"

#include <algorithm>
#include <vector>

#include "kernels/stream.h"

namespace samestep {

StagedReduction::StagedReduction(const ReductionTask& task) : task_(task) {
  constexpr std::size_t kRounding = 512;  // a plan may make pieces a little longer
  const auto size = static_cast<std::size_t>(task.size());
  const std::size_t share = Arena::kStageBytes / size;
  const std::size_t piece = std::max<std::size_t>(1, (share > kRounding ? share - kRounding : 0) / task.itemsize());
  plan_ = task.verb == Verb::reduce_scatter ? WindowPlan::of_blocks(task.size(), task.out.count, piece)
                                            : WindowPlan::of_buffer(task.size(), task.in.count, piece);
  piece_bytes_ = plan_.longest() * task.itemsize();
}

std::byte* StagedReduction::staged(int rank, std::size_t window, int owner) const {
  return task_.group->arena->stage(rank, window) + static_cast<std::size_t>(owner) * piece_bytes_;
}

void StagedReduction::begin() {
  const auto staged = [](const PostedBuffers& posted) { return posted.first_is_staged; };
  first_is_staged_ = staged(task_.posted_by(task_.rank()));
  if (std::all_of(task_.posted.begin(), task_.posted.end(), staged)) step_ = first_ = 1;
}

bool StagedReduction::work() {
  const std::size_t windows = plan_.windows();
  while (step_ < windows + 2) {
    // Nobody else touches this rank's stages before its first step, nor after its last.
    if (step_ != first_ && !task_.all_at(step_)) return false;
    const std::size_t k = step_;
    if (k >= 2) copy_out(k - 2);
    if (k < windows && !(k == 0 && first_is_staged_)) copy_in(k);
    if (k >= 1 && k <= windows) reduce_own(k - 1);
    task_.set_step(++step_);
  }
  return true;
}

void StagedReduction::copy_in(std::size_t window) const {
  for (int owner = 0; owner < task_.size(); ++owner) {
    const Chunk chunk = plan_.chunk(window, owner);
    if (owner == task_.rank() || chunk.count == 0) continue;
    kernels::copy(staged(task_.rank(), window, owner),
                  static_cast<const std::byte*>(task_.in.data) + chunk.in_offset * task_.itemsize(),
                  chunk.count * task_.itemsize());
  }
}

void StagedReduction::reduce_own(std::size_t window) const {
  const int me = task_.rank();
  const Chunk chunk = plan_.chunk(window, me);
  if (chunk.count == 0) return;
  std::vector<kernels::Input>& inputs = task_.group->inputs;
  std::vector<void*>& outs = task_.group->outs;
  inputs.resize(static_cast<std::size_t>(task_.size()));
  outs.clear();
  for (int rank = 0; rank < task_.size(); ++rank) {
    std::byte* const lines = staged(rank, window, me);
    const bool wants = task_.wanted_by(rank) && (rank == me || task_.verb != Verb::reduce_scatter);
    const std::byte* const own = static_cast<const std::byte*>(task_.in.data) + chunk.in_offset * task_.itemsize();
    inputs[static_cast<std::size_t>(rank)] = {rank == me ? own : lines, task_.posted_by(rank).factor};
    if (!wants) continue;
    outs.push_back(rank == me ? static_cast<std::byte*>(task_.out.data) + chunk.out_offset * task_.itemsize() : lines);
  }
  kernels::reduce_into(task_.in.dtype, task_.reduction.op, inputs, outs, chunk.count);
}

void StagedReduction::copy_out(std::size_t window) const {
  if (task_.verb == Verb::reduce_scatter || !task_.wanted_by(task_.rank())) return;
  for (int step = 1; step < task_.size(); ++step) {
    const int owner = (task_.rank() + step) % task_.size();
    const Chunk chunk = plan_.chunk(window, owner);
    if (chunk.count == 0) continue;
    kernels::copy(static_cast<std::byte*>(task_.out.data) + chunk.out_offset * task_.itemsize(),
                  staged(task_.rank(), window, owner), chunk.count * task_.itemsize());
  }
}

}  // namespace samestep
