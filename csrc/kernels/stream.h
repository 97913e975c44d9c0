#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace samestep::kernels {

/// Copies with non-temporal stores, which do not read the old contents of `to` and so save one pass over memory. For
/// destinations that are not read soon. The buffers do not overlap.
void copy_nontemporal(void* to, const void* from, std::size_t nbytes);

/// Copies memory that another CPU has written, with vector loads and stores. memcpy uses string instructions for long
/// copies, which read such lines at half the speed on some processors.
void copy_vectorized(void* to, const void* from, std::size_t nbytes);

/// memcpy that accepts null pointers with a length of 0. On AMD's Zen 3 the string instruction that glibc uses from 2
/// KiB on is sixteen times slower if `to` begins up to 31 bytes later in its page than `from` (docs/design/0011);
/// such copies use vectors.
inline void copy(void* to, const void* from, std::size_t nbytes) {
  constexpr std::size_t kByString = 2048, kPage = 4096, kNear = 32;
  const std::size_t ahead = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % kPage;
  if (nbytes > kByString && ahead != 0 && ahead < kNear) return copy_vectorized(to, from, nbytes);
  if (nbytes != 0) std::memcpy(to, from, nbytes);
}

/// Whether the only reader of shared cache lines takes ownership of them: it stores one word of each line again,
/// unchanged, so that the lines are exclusive in its cache. On AMD a store into a line that another CPU has only read
/// is slow; on Intel it is not, and ownership costs up to a fifth of an operation (docs/design/0011). Tests may set it.
bool owns_after_read();
void set_owns_after_read(bool owns);

/// copy_vectorized, and takes ownership of the lines of `from` if `owns_after_read`. No other CPU may access them
/// meanwhile.
void copy_and_own_lines(void* to, void* from, std::size_t nbytes);

/// Takes ownership of lines that this CPU has read, if `owns_after_read`.
void own_lines(void* lines, std::size_t nbytes);

/// Copies a part of an operation in which all ranks together access `footprint` bytes; with non-temporal stores if
/// these exceed the caches.
void copy_auto(void* to, const void* from, std::size_t nbytes, std::size_t footprint);

}  // namespace samestep::kernels
