#pragma once

#include "communicator/collective_args.h"

namespace samestep {

/// Whether an operation on device memory could overwrite parts of its input before it has read them: on `rank` the
/// input shares memory with the output, but not as NCCL expects it in place. In place are: reductions
/// whose buffers are equal; a gather whose input is block `rank` of its output; a scatter whose output is block `rank`
/// of its input. Source: NCCL documentation, "In-place Operations".
bool overwrites_input(const CollectiveArgs& args, int rank);

}  // namespace samestep
