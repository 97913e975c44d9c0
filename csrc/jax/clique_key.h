#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace samestep {

using DeviceId = std::int32_t;  ///< as XLA's GlobalDeviceId has it
using DeviceIds = std::vector<DeviceId>;

/// The devices of the group that XLA is about to make, in order of rank, or nothing where they are not found.
///
/// XLA tells MPI only the group's first device and the caller's rank, and calls MPI_Comm_split on the group's members
/// alone, which MPI does not allow: with a mesh over some of the processes, MPI would wait for the others forever. But
/// the caller has the list at hand, as an object in a frame of its stack: a pointer to a table of virtual functions of
/// the library that called, then a vector of device ids. This looks for such an object, from the innermost frame on.
///
/// Reads memory that may not be mapped by process_vm_readv, so nothing can crash. `is_possible` rejects what cannot be
/// the list. What is found is a claim: the members compare their lists before they become a group.
///
/// Args:
///   caller: an address in the library that called.
DeviceIds find_clique(const void* caller, const std::function<bool(const DeviceIds&)>& is_possible);

}  // namespace samestep
