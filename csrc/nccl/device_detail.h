#pragma once

#include <string>
#include <string_view>

#include "core/buffer.h"
#include "core/format.h"

// What the files of DeviceCommunicator share.

namespace samestep::device_detail {

inline bool on_host(const ConstBuffer& buffer) { return buffer.device.kind == DeviceKind::cpu; }

/// Without elements, for what the host is to compare.
inline ConstBuffer empty(const ConstBuffer& buffer) { return {nullptr, 0, buffer.dtype}; }
inline Buffer nothing(const ConstBuffer& buffer) { return {nullptr, 0, buffer.dtype}; }

inline std::string describe(std::string_view verb, const ConstBuffer& buffer) {
  return str(verb, " of ", buffer.count, " ", name(buffer.dtype), " on the device");
}

}  // namespace samestep::device_detail
