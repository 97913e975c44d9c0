#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace samestep::kernels {

/// The CRC32C (Castagnoli) of a run of bytes; `crc`: of those before it. Finds every change of one or two bits, of an
/// odd number of bits, or within 32 bits in a row.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t crc = 0);

/// One way to compute it; `crc` is inverted before and after.
using Crc32cWay = std::uint32_t (*)(std::uint32_t crc, const std::byte* data, std::size_t nbytes);

/// Those that this processor has, slowest first: `crc32c` takes the last, and all give the same. For tests.
std::vector<Crc32cWay> crc32c_ways();

}  // namespace samestep::kernels
