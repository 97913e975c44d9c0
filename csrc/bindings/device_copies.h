#pragma once

#include <memory>

#include "bindings/array_view.h"
#include "core/reduce_op.h"
#include "nccl/gpu_library.h"

namespace samestep {

/// Makes the runtime of a kind of devices known to what follows. It stays for the life of the process.
void register_gpu(std::shared_ptr<GpuLibrary> gpu);

/// The runtime for the memory of `view`, or null.
GpuLibrary* gpu_of(const ArrayView& view);

/// Copies elements of a contiguous array in device memory to the host or back, after what is in the array's stream,
/// and waits for it. `view.stream` has been set.
void copy_to_host(const ArrayView& from, void* to);
void copy_to_device(const void* from, const ArrayView& to);

/// Whether NCCL itself has this reduction.
bool reduces_on_device(DType dtype, ReduceOp op);

}  // namespace samestep
