#pragma once

#include <cstdint>

namespace samestep::tags {

// MPI promises no tag above 32767.
inline constexpr int kMeeting = 1;
inline constexpr int kFarewell = 2;
inline constexpr int kMakeGroup = 3;

/// A tag for the transport's own making of a group. Open MPI sends under the tag it is given there,
/// among the ordinary messages of the communicator, so no other message may have it.
inline constexpr int kTransportMakesGroup = 4;

/// A message between users; its own tag is in its header.
inline constexpr int kUserMessage = 5;

/// A rank that has waited for long tells the others that it has come.
inline constexpr int kHasCome = 6;

/// Two tags (phase 0 and 1) for each of 4096 operations in flight, and one for their descriptions.
inline constexpr int kOperations = 4096;
inline int of_operation(std::uint64_t sequence, int phase) {
  return 16 + static_cast<int>(sequence % kOperations) * 3 + phase;
}
inline constexpr int kPhaseDescribe = 2;

/// Bodies of long point-to-point messages, by the sender's count of them.
inline constexpr int kBodies = 8192;
inline int of_body(std::uint32_t counter) { return 16 + kOperations * 3 + static_cast<int>(counter % kBodies); }

/// All of them are below this, which is as much as MPI promises.
inline constexpr int kEnd = 32768;
static_assert(16 + kOperations * 3 + kBodies <= kEnd);

}  // namespace samestep::tags
