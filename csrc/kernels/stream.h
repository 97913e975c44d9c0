#pragma once

#include <cstddef>

namespace samestep::kernels {

/// Copies memory that nobody will look at soon, past the caches: one pass over memory less, for the old contents of
/// `to` are not read. The buffers do not overlap.
void copy_past_caches(void* to, const void* from, std::size_t nbytes);

/// Copies of fewer bytes are better left to the caches.
inline constexpr std::size_t kPastCachesFrom = 32 << 20;

}  // namespace samestep::kernels
