#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "core/buffer.h"

namespace samestep {

/// Contiguous writable device memory that is to be handed to another library.
struct DLPackExport {
  pybind11::object owner;  ///< keeps the memory alive
  void* data;
  DType dtype;
  std::vector<std::int64_t> shape;
  DeviceKind kind;
  int device;
};

/// A capsule of DLPack 1.0, or of the layout before it. With the GIL held.
pybind11::object to_dlpack(const DLPackExport& of, bool versioned);

}  // namespace samestep
