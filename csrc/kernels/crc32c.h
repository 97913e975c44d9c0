#pragma once

#include <cstddef>
#include <cstdint>

namespace samestep::kernels {

/// The CRC32C (Castagnoli) of a run of bytes; `crc`: of those before it. Finds every change of one or two bits, of an
/// odd number of bits, or within 32 bits in a row. Uses the processor's instruction where it has one.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc = 0);

/// The same by a table, on every processor.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t crc = 0);

}  // namespace samestep::kernels
