#pragma once

#include <cstddef>
#include <cstdint>

namespace samestep {

/// A run of bytes here and as many in another process, of which one is to become a copy of the other.
struct Piece {
  std::byte* mine;
  std::uint64_t theirs;  ///< where it is there: see whoever takes the piece
  std::size_t nbytes;
};

}  // namespace samestep
