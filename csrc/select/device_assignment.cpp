#include "select/device_assignment.h"

#include <algorithm>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

// Throws unless devices[local_rank] is one that each rank of this host can use. Checks the entries of
// all ranks of the host, so that all of them throw.
void check_list(const std::string& kind_name, const std::vector<int>& devices, int local_size, int n_visible,
                const std::string& looked_for) {
  const auto needed = static_cast<std::size_t>(local_size);
  if (devices.size() < needed) {
    throw InvalidArgumentError(str(kind_name, "_devices has ", devices.size(), " entries, but this host has ",
                                   local_size, " ranks: give one device for each node-local rank"));
  }
  const auto negative = std::ranges::find_if(devices, [](int device) { return device < 0; });
  if (negative != devices.end()) {
    throw InvalidArgumentError(
        str(kind_name, "_devices[", negative - devices.begin(), "] is ", *negative, ": devices are numbered from 0"));
  }
  if (n_visible == 0) {
    throw UnavailableError(str(kind_name, "_devices were given, but this process sees no ", kind_name, " device: ",
                               looked_for, ". Cure: leave ", kind_name, "_devices out to run without one"));
  }
  for (std::size_t i = 0; i < needed; ++i) {
    if (devices[i] < n_visible) continue;
    throw UnavailableError(str(kind_name, "_devices[", i, "] is ", devices[i], ", but this process sees ", n_visible,
                               " ", kind_name, " device", n_visible == 1 ? "" : "s",
                               ", numbered from 0. A mask such as CUDA_VISIBLE_DEVICES hides devices and numbers the "
                               "others anew; where the launcher gives each rank a device of its own, leave ",
                               kind_name, "_devices out"));
  }
}

}  // namespace

std::optional<int> assign_device(const std::string& kind_name, const DeviceRequest& request, int local_rank,
                                 int local_size, int n_visible, const std::string& looked_for) {
  if (local_rank < 0 || local_rank >= local_size) {
    throw InvalidArgumentError(str("assign_device: local rank ", local_rank, " is outside [0, ", local_size, ")"));
  }
  switch (request.kind) {
    case DeviceRequest::Kind::leave_alone:
      return std::nullopt;
    case DeviceRequest::Kind::round_robin:
      // More ranks than devices share them. Without a device the rank works on the host.
      return n_visible > 0 ? std::optional(local_rank % n_visible) : std::nullopt;
    case DeviceRequest::Kind::list:
      break;
  }
  check_list(kind_name, request.devices, local_size, n_visible, looked_for);
  return request.devices[static_cast<std::size_t>(local_rank)];
}

}  // namespace samestep
