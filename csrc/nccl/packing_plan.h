#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace samestep {

inline constexpr std::size_t kPackedAtOnce = 128;  ///< leaves in one launch: their table must fit a kernel's arguments
inline constexpr std::size_t kPackedAlignment = 16;  ///< bytes: what a thread of a device moves at once

/// Leaves that travel together in one bucket.
struct PackedRound {
  std::vector<std::size_t> leaves;    ///< indices, ascending
  std::vector<std::uint32_t> starts;  ///< of each in the bucket, in units of kPackedAlignment
  std::size_t nbytes = 0;             ///< of the bucket, with what fills the gaps
};

/// Which leaves are packed: those of 1 to `below` - 1 bytes, in their order, at most kPackedAtOnce and `bucket_nbytes`
/// in a round. None if they are so few that two launches cost more than they save. `below` <= `bucket_nbytes`.
///
/// Pure: ranks with leaves of the same sizes make the same plan.
std::vector<PackedRound> plan_packing(std::span<const std::size_t> leaf_nbytes, std::size_t below,
                                      std::size_t bucket_nbytes);

}  // namespace samestep
