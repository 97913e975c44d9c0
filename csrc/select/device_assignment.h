#pragma once

#include <optional>
#include <string>
#include <vector>

namespace samestep {

/// The user's request for one kind of device.
struct DeviceRequest {
  enum class Kind { round_robin, leave_alone, list };
  Kind kind = Kind::round_robin;
  std::vector<int> devices = {};  ///< `list`: the device for each node-local rank
};

/// The device this rank uses, as an index among the *visible* devices, or nothing.
///
/// round_robin: local_rank mod n_visible; nothing without a device. leave_alone: nothing. list:
/// devices[local_rank]. With one visible device per process (a launcher that sets a mask with one entry
/// for each rank) that device is index 0.
///
/// `kind_name` is "cuda" or "amdgpu", for error texts. Pure.
///
/// Throws InvalidArgumentError for a list shorter than local_size, an entry < 0, or a local_rank outside the host.
/// Throws UnavailableError for a list if n_visible is 0 (with `looked_for`), or if the entry of any rank of this host
/// is not below n_visible: then all ranks throw, and none waits for another.
std::optional<int> assign_device(const std::string& kind_name, const DeviceRequest& request, int local_rank,
                                 int local_size, int n_visible, const std::string& looked_for);

}  // namespace samestep
