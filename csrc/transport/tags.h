#pragma once

#include <cstdint>

namespace samestep::tags {

// MPI guarantees tags up to 32767 and none above.
inline constexpr int kHeaders = 1;
inline constexpr int kLeaveNotice = 2;
inline constexpr int kMakeGroup = 3;

/// For MPI_Comm_create_group. Open MPI sends with this tag among the ordinary messages of the communicator, so no
/// other message may use it.
inline constexpr int kTransportMakesGroup = 4;

/// A point-to-point message of the user, whose tag is in its header.
inline constexpr int kUserMessage = 5;

/// A rank that has waited long notifies the others that it has arrived.
inline constexpr int kArrivedNotice = 6;

/// A rank waits at the end of a block of `together()`.
inline constexpr int kBlockEndNotice = 7;

/// Three tags for each of 4096 operations in flight: two phases of data, and descriptions for mismatch errors.
inline constexpr int kOperations = 4096;
inline int of_operation(std::uint64_t sequence, int phase) {
  return 16 + static_cast<int>(sequence % kOperations) * 3 + phase;
}
inline constexpr int kPhaseDescribe = 2;

/// The bodies of long point-to-point messages, numbered by the sender.
inline constexpr int kBodies = 8192;
inline int of_body(std::uint32_t counter) { return 16 + kOperations * 3 + static_cast<int>(counter % kBodies); }

/// All tags are below this.
inline constexpr int kEnd = 32768;
static_assert(16 + kOperations * 3 + kBodies <= kEnd);

}  // namespace samestep::tags
