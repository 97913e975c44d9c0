#include "nccl/packing_plan.h"

namespace samestep {
namespace {

// Packing and unpacking are two launches, which is what two calls in a group of NCCL cost on the host.
constexpr std::size_t kFewest = 4;

}  // namespace

std::vector<PackedRound> plan_packing(std::span<const std::size_t> leaf_nbytes, std::size_t below,
                                      std::size_t bucket_nbytes) {
  std::vector<PackedRound> rounds;
  std::size_t n_packed = 0;
  for (std::size_t i = 0; i < leaf_nbytes.size(); ++i) {
    if (leaf_nbytes[i] == 0 || leaf_nbytes[i] >= below) continue;
    const std::size_t taken = (leaf_nbytes[i] + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
    if (rounds.empty() || rounds.back().leaves.size() == kPackedAtOnce ||
        rounds.back().nbytes + taken > bucket_nbytes) {
      rounds.emplace_back();
    }
    PackedRound& round = rounds.back();
    round.leaves.push_back(i);
    round.starts.push_back(static_cast<std::uint32_t>(round.nbytes / kPackedAlignment));
    round.nbytes += taken;
    ++n_packed;
  }
  if (n_packed < kFewest) rounds.clear();
  return rounds;
}

}  // namespace samestep
