#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace samestep {

/// Where memory lives. Host engines accept `cpu` only.
enum class DeviceKind : std::uint8_t { cpu, cuda, rocm, other };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// A stream of a GPU, as the runtime's handle (0: the default stream) for whoever knows the runtime.
using StreamHandle = std::uint64_t;
/// No stream: the elements are there, and whoever uses them next waits on the host.
inline constexpr StreamHandle kNoStream = ~StreamHandle{0};

/// Contiguous elements that are only read. Does not own them: whoever starts an operation keeps
/// the memory alive until its Work is done.
struct ConstBuffer {
  const void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::uint8;
  Device device = {};
  StreamHandle stream = kNoStream;  ///< device memory: where it is written, and read afterwards

  std::size_t nbytes() const { return count * itemsize(dtype); }
};

/// The same, writable.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::uint8;
  Device device = {};
  StreamHandle stream = kNoStream;  ///< device memory: where it is used before and after

  std::size_t nbytes() const { return count * itemsize(dtype); }
  operator ConstBuffer() const { return {data, count, dtype, device, stream}; }
};

/// What an operation reads, and where it writes; the same memory if it works in place.
struct InOut {
  ConstBuffer in;
  Buffer out;
};

}  // namespace samestep
