#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace samestep {

/// The kind of memory. Communicators of the host accept `cpu` only.
enum class DeviceKind : std::uint8_t { cpu, cuda, rocm, other };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// A GPU stream, as the handle of its runtime (0: the default stream).
using StreamHandle = std::uint64_t;
/// No stream: the elements are valid now, and their next use is ordered by waiting on the host.
inline constexpr StreamHandle kNoStream = ~StreamHandle{0};
inline constexpr StreamHandle kLegacyStream = 0;     ///< the default stream, which streams made without flags wait for
inline constexpr StreamHandle kPerThreadStream = 2;  ///< another one for each thread that names it

/// Contiguous elements that are only read. Non-owning: the caller of an operation keeps the memory alive
/// until its Work is done.
struct ConstBuffer {
  const void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::uint8;
  Device device = {};
  StreamHandle stream = kNoStream;  ///< device memory: the stream that writes it, and reads it afterwards

  std::size_t nbytes() const { return count * itemsize(dtype); }
};

/// The same, writable.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;  ///< elements
  DType dtype = DType::uint8;
  Device device = {};
  StreamHandle stream = kNoStream;  ///< device memory: the stream that uses it before and after

  std::size_t nbytes() const { return count * itemsize(dtype); }
  operator ConstBuffer() const { return {data, count, dtype, device, stream}; }
};

/// Whether two ranges overlap; an empty one overlaps nothing.
inline bool share_memory(const void* a, std::size_t a_nbytes, const void* b, std::size_t b_nbytes) {
  const auto from_a = reinterpret_cast<std::uintptr_t>(a), from_b = reinterpret_cast<std::uintptr_t>(b);
  return std::max(from_a, from_b) < std::min(from_a + a_nbytes, from_b + b_nbytes);
}
inline bool share_memory(const ConstBuffer& a, const ConstBuffer& b) {
  if (a.device.kind != DeviceKind::cpu || b.device.kind != DeviceKind::cpu) return false;
  return share_memory(a.data, a.nbytes(), b.data, b.nbytes());
}

/// The input and the output of an operation; the same memory if it works in place.
struct InOut {
  ConstBuffer in;
  Buffer out;
};

}  // namespace samestep
