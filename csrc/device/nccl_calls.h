#pragma once

#include <vector>

#include "communicator/collective_args.h"
#include "nccl/nccl_comm.h"

/// Collectives as NCCL calls in a stream. Arguments have been checked.
namespace samestep::nccl_calls {

NcclCalls of(const NcclLibrary& nccl, const CollectiveArgs& args, int rank, int size);
/// An allreduce or bcast, of `out`, of each of `buffers`, which have one dtype and form one NCCL group.
NcclCalls of_many(const NcclLibrary& nccl, const CollectiveArgs& args, std::vector<InOut> buffers, int size);

}  // namespace samestep::nccl_calls
