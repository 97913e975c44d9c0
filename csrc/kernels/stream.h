#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace samestep::kernels {

/// Copies memory that nobody will look at soon, past the caches: one pass over memory less, for the old contents of
/// `to` are not read. The buffers do not overlap.
void copy_past_caches(void* to, const void* from, std::size_t nbytes);

/// Copies memory that another processor has written, by loads and stores of vectors: string instructions, which memcpy
/// takes for long copies, read such lines at half the speed on some processors.
void copy_lines(void* to, const void* from, std::size_t nbytes);

/// memcpy, which may be given nothing. On AMD's Zen 3 the string instruction that glibc takes from 2 KiB on needs
/// sixteen times as long where `to` begins up to 31 bytes further in its page than `from` (docs/design/0015): such
/// copies go by vectors.
inline void copy(void* to, const void* from, std::size_t nbytes) {
  constexpr std::size_t kByString = 2048, kPage = 4096, kNear = 32;
  const std::size_t ahead = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % kPage;
  if (nbytes > kByString && ahead != 0 && ahead < kNear) return copy_lines(to, from, nbytes);
  if (nbytes != 0) std::memcpy(to, from, nbytes);
}

/// Do lines go back to who writes them next by a store of who has read them? On AMD's processors a store into lines
/// which another one has only read waits long for each; on Intel's it does not, and giving back costs up to a fifth of
/// an operation (docs/design/0012). Tests may set it.
bool gives_back();
void set_gives_back(bool gives);

/// copy_lines, and where `gives_back` stores a word of each line of `from` again, unchanged: `from` is to be written
/// next by whoever wrote it before. Nobody else may read it meanwhile.
void take_lines(void* to, void* from, std::size_t nbytes);

/// What take_lines does to the lines, after they have been read in another way.
void give_back_lines(void* lines, std::size_t nbytes);

/// Copies a part of an operation in which all ranks together touch so many bytes, past the caches if they are more than
/// fit in there.
void copy_part(void* to, const void* from, std::size_t nbytes, std::size_t touched);

}  // namespace samestep::kernels
