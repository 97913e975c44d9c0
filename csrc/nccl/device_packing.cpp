#include "nccl/device_packing.h"

#include <algorithm>

#include "core/error.h"
#include "nccl/gpu_memory.h"

namespace samestep {

std::size_t DevicePacking::mine() {
  if (packer_ == nullptr || below_ == 0 || !packer_->problem().empty()) return 0;
  try {  // before ranks agree, so that one whose device is full only says so
    const OnDevice on(*gpu_, device_);
    bucket_ = device_memory(gpu_, kBucket);
  } catch (const Error&) {
    return 0;
  }
  return std::min(below_, kBucket);
}

std::optional<nccl_calls::Packing> DevicePacking::plan(std::span<const std::size_t> leaf_nbytes,
                                                       Communicator& agreement, const Deadline& deadline) {
  if (!agreed_) {
    std::uint64_t limit = mine();
    const Buffer in_place{&limit, 1, DType::uint64};
    agreement.all_reduce(in_place, in_place, {ReduceOp::min, 1.0}, Shape::flat(1))->wait(deadline);
    agreed_ = limit;
    if (limit == 0) bucket_ = nullptr;
  }
  std::vector<PackedRound> rounds = plan_packing(leaf_nbytes, *agreed_, kBucket);
  if (rounds.empty()) return std::nullopt;
  return nccl_calls::Packing{packer_, bucket_, std::move(rounds)};
}

}  // namespace samestep
