#include "node/staged_reduction.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace samestep {

StagedReduction::StagedReduction(const ReductionTask& task) : task_(task) {
  // Short ones in one go; long ones in pieces of which three fit the cache.
  const std::size_t window = task.in.nbytes() <= Arena::kStageBytes ? Arena::kStageBytes : Arena::kStageBytes / 4;
  constexpr std::size_t kRounding = 512;  // a plan may make pieces a little longer
  const auto size = static_cast<std::size_t>(task.size());
  const std::size_t piece = std::max<std::size_t>(1, (window / size - kRounding) / task.itemsize());
  plan_ = task.verb == Verb::reduce_scatter ? WindowPlan::of_blocks(task.size(), task.out.count, piece)
                                            : WindowPlan::of_buffer(task.size(), task.in.count, piece);
  piece_bytes_ = plan_.longest() * task.itemsize();
}

std::byte* StagedReduction::staged(int rank, std::size_t window, int owner) const {
  return task_.group->arena->stage(rank, window) + static_cast<std::size_t>(owner) * piece_bytes_;
}

bool StagedReduction::stage_is_free() const {
  if (step_ != 0) return task_.all_at(step_);
  const std::uint64_t used_by = task_.group->stages_used_by;
  return used_by == 0 || task_.group->meeting->released_by_all(used_by - 1);
}

bool StagedReduction::work() {
  const std::size_t windows = plan_.windows();
  while (step_ < windows + 2) {
    if (!stage_is_free()) return false;
    const std::size_t k = step_;
    if (k >= 2) copy_out(k - 2);
    if (k < windows) copy_in(k);
    if (k >= 1 && k <= windows) reduce_own(k - 1);
    task_.set_step(++step_);
  }
  task_.group->stages_used_by = task_.sequence + 1;
  return true;
}

void StagedReduction::copy_in(std::size_t window) const {
  for (int owner = 0; owner < task_.size(); ++owner) {
    const Chunk chunk = plan_.chunk(window, owner);
    if (owner == task_.rank() || chunk.count == 0) continue;
    std::memcpy(staged(task_.rank(), window, owner),
                static_cast<const std::byte*>(task_.in.data) + chunk.in_offset * task_.itemsize(),
                chunk.count * task_.itemsize());
  }
}

void StagedReduction::reduce_own(std::size_t window) const {
  const int me = task_.rank();
  const Chunk chunk = plan_.chunk(window, me);
  if (chunk.count == 0) return;
  std::vector<kernels::Input> inputs(static_cast<std::size_t>(task_.size()));
  for (int rank = 0; rank < task_.size(); ++rank) {
    const void* data = staged(rank, window, me);
    if (rank == me) data = static_cast<const std::byte*>(task_.in.data) + chunk.in_offset * task_.itemsize();
    inputs[static_cast<std::size_t>(rank)] = {data, task_.posted_by(rank).factor};
  }
  const bool keeps = task_.wanted_by(me), gives = task_.verb != Verb::reduce_scatter;
  std::byte* const own =
      keeps ? static_cast<std::byte*>(task_.out.data) + chunk.out_offset * task_.itemsize() : nullptr;
  void* const outs[] = {own, staged(me, window, me)};
  const std::span<void* const> wanted(outs + (keeps ? 0 : 1), (keeps ? 1U : 0U) + (gives ? 1U : 0U));
  kernels::reduce_into(task_.in.dtype, task_.reduction.op, inputs, wanted, chunk.count);
}

void StagedReduction::copy_out(std::size_t window) const {
  if (task_.verb == Verb::reduce_scatter || !task_.wanted_by(task_.rank())) return;
  for (int step = 1; step < task_.size(); ++step) {
    const int owner = (task_.rank() + step) % task_.size();
    const Chunk chunk = plan_.chunk(window, owner);
    if (chunk.count == 0) continue;
    std::memcpy(static_cast<std::byte*>(task_.out.data) + chunk.out_offset * task_.itemsize(),
                staged(owner, window, owner), chunk.count * task_.itemsize());
  }
}

}  // namespace samestep
