#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace samestep::kernels {

/// A 128-bit hash of a run of bytes that depends on the position of every byte and on their number.
///
/// Two runs of one length that differ in a single 8-byte word never collide; other pairs do with a probability of about
/// 2^-128, as long as nobody chooses the bytes to collide: it is no cryptographic hash. The same on all little-endian
/// machines. Reads the memory once, at about the speed of memory.
std::array<std::uint64_t, 2> hash128(const void* data, std::size_t nbytes);

}  // namespace samestep::kernels
