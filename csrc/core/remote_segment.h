#pragma once

#include <cstddef>
#include <cstdint>

namespace samestep {

/// A range of bytes in this process and one of the same length in another; one is to be copied to the other.
struct RemoteSegment {
  std::byte* local;
  std::uint64_t remote;  ///< its address or offset in the other process, as the transport defines it
  std::size_t nbytes;
};

}  // namespace samestep
