#pragma once

#include <memory>
#include <vector>

#include "nccl/nccl_calls.h"
#include "nccl/packer.h"

namespace samestep::nccl_calls {

/// What moves many arrays through one bucket.
struct Packing {
  std::shared_ptr<Packer> packer;
  std::shared_ptr<void> bucket;     ///< device memory for the largest round; used by one operation after another
  std::vector<PackedRound> rounds;  ///< of `plan_packing` over the buffers; not empty
};

/// As `all_reduce` and `broadcast` of these buffers, but those in `packing` go through its bucket.
///
/// The calls are to be made one after another in one stream, each once NCCL has begun what the one before asked for:
/// a communicator that does not block may put its work into the stream after its call has returned.
std::vector<Calls> packed_all_reduce(const NcclLibrary& nccl, const NcclForm& form, const Reduction& reduction,
                                     std::vector<InOut> buffers, Packing packing);
/// `sends`: whether this rank is the root, whose buffers stay as they are.
std::vector<Calls> packed_broadcast(const NcclLibrary& nccl, std::vector<Buffer> buffers, int root, bool sends,
                                    Packing packing);

}  // namespace samestep::nccl_calls
