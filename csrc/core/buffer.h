#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace samestep {

/// Where memory lives. Host engines accept `cpu` only.
enum class DeviceKind : std::uint8_t { cpu, cuda, rocm, other };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// Contiguous elements that are only read. Does not own them: whoever starts an operation keeps
/// the memory alive until its Work is done.
struct ConstBuffer {
  const void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::uint8;
  Device device = {};

  std::size_t nbytes() const { return count * itemsize(dtype); }
};

/// The same, writable.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::uint8;
  Device device = {};

  std::size_t nbytes() const { return count * itemsize(dtype); }
  operator ConstBuffer() const { return {data, count, dtype, device}; }
};

}  // namespace samestep
