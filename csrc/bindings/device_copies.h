#pragma once

#include <memory>

#include "bindings/array_view.h"
#include "core/reduce_op.h"
#include "gpu/gpu_library.h"

namespace samestep {

/// Registers the runtime of a kind of devices, for the life of the process.
void register_gpu(std::shared_ptr<GpuLibrary> gpu);

/// The runtime for the memory of `view`, or null.
GpuLibrary* gpu_of(const ArrayView& view);

/// Copies elements of a contiguous array in device memory to the host or back, after what is in the array's stream,
/// and waits for it. `view.stream` has been set.
void copy_to_host(const ArrayView& from, void* to);
void copy_to_device(const void* from, const ArrayView& to);

/// "cpu", "cuda", "rocm" or "other".
const char* device_name(DeviceKind kind);

/// Throws InvalidArgumentError unless elements can be copied: they are on the host, or contiguous on a device whose
/// runtime has been registered. Sets `view.stream`. With the GIL held.
void require_reachable(PyObject* object, ArrayView& view);

/// Copies the elements of a reachable array, in row-major order, to host memory. Not for arrays without elements.
void pack_elements(const ArrayView& from, void* to);

/// Whether NCCL itself has this reduction.
bool reduces_on_device(DType dtype, ReduceOp op);

}  // namespace samestep
