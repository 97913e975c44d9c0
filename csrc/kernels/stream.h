#pragma once

#include <cstddef>

namespace samestep::kernels {

/// Copies memory that nobody will look at soon, past the caches: one pass over memory less, for the old contents of
/// `to` are not read. The buffers do not overlap.
void copy_past_caches(void* to, const void* from, std::size_t nbytes);

/// Copies a part of `whole` bytes, past the caches if they are more than fit in there.
void copy_part(void* to, const void* from, std::size_t nbytes, std::size_t whole);

}  // namespace samestep::kernels
