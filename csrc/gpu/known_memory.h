#pragma once

#include <string_view>

#include "core/buffer.h"
#include "core/error.h"
#include "core/format.h"
#include "gpu/gpu_library.h"

namespace samestep {

/// The device of `buffer`, which has elements: the runtime is asked where the array's library does not say it.
/// Throws InvalidArgumentError if the runtime does not know the address, as that of memory which has been freed.
inline int require_device(std::string_view verb, const GpuLibrary& gpu, const ConstBuffer& buffer) {
  const int device = buffer.device.index >= 0 ? buffer.device.index : gpu.device_of(buffer.data);
  if (device >= 0) return device;
  throw InvalidArgumentError(
      str(verb, ": the array says that it is in device memory, but ", gpu.path(), " does not know its address"));
}

}  // namespace samestep
